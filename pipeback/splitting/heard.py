"""Heard: calls of modules, of custom autograd functions and of functions under torch.vmap, told to whoever follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pipeback.private import maps_heard

_one_at_a_time = threading.Lock()
_CALL, _APPLY = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]


@contextmanager
def calls_heard(called: Callable[..., Any], applied: Callable[..., Any], mapped: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile each is given what would run, and what it would run on, and runs it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(_CALL, module, args, kwargs)

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(_APPLY.__get__(None, function), function, args, kwargs)

    with _one_at_a_time, maps_heard(mapped), ExitStack() as stack:
        stack.callback(setattr, nn.Module, "__call__", _CALL)
        stack.callback(setattr, torch.autograd.Function, "apply", _APPLY)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)
        yield
