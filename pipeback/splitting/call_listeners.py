"""Call listeners: let the tracer intercept calls of modules, of custom autograd functions and under torch.vmap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pipeback.private import maps_heard

_one_at_a_time = threading.RLock()
_APPLY = torch.autograd.Function.__dict__["apply"]


@contextmanager
def calls_heard(
    modules: Iterable[nn.Module],
    called: Callable[..., Any],
    applied: Callable[..., Any],
    mapped: Callable[..., Any],
) -> Iterator[None]:
    """A context within which calls are intercepted: of modules by `called`, of custom autograd functions by `applied`,
    and of functions under torch.vmap by `mapped`. Each is given the original function and its arguments, and runs it.

    modules: those whose calls are intercepted, together with all other modules of their classes.
    """

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(_APPLY.__get__(None, function), function, args, kwargs)

    with modules_heard(modules, called), maps_heard(mapped), ExitStack() as stack:
        stack.callback(setattr, torch.autograd.Function, "apply", _APPLY)
        torch.autograd.Function.apply = classmethod(apply)
        yield


@contextmanager
def modules_heard(modules: Iterable[nn.Module], called: Callable[..., Any]) -> Iterator[None]:
    """A context within which calls of these modules, and of all others of their classes, are intercepted by `called`.

    A thread may have several such contexts, of which the last one hears of a call first; other threads wait.
    """
    with _one_at_a_time, instead([(k, "__call__", _call(k.__call__, called)) for k in set(map(type, modules))]):
        yield


def _call(original: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(original, module, args, kwargs)

    return call


@contextmanager
def instead(methods: Sequence[tuple[type, str, Callable[..., Any]]]) -> Iterator[None]:
    """A context within which these classes have these methods.

    It is used on classes of modules rather than on nn.Module, since Python visits all hundreds of subclasses of a class
    that is changed.
    """
    own = [(kind, name, vars(kind).get(name)) for kind, name, _ in methods]
    begun = 0
    try:
        for kind, name, function in methods:
            setattr(kind, name, function)
            begun += 1
        yield
    finally:
        for kind, name, before in own[:begun][::-1]:
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)
