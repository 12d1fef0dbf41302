"""Script values: functions and values that the text of a stage script cannot name, as objects that it can call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from pipeback.private import pytree
from pipeback.splitting.stage_script import Name, Script
from pipeback.tensors.structures import ABSENT, SINGLE, UNSEEN, Form, Ref


class Applied:
    """The call of a custom torch.autograd.Function."""

    __module__ = "pipeback"

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Operator:
    """An operator of Tensor that no module has under its own name: x ** 2 is `TensorBase.pow` of torch._tensor."""

    __module__ = "pipeback"

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@lru_cache
def operator_of(function: Any) -> Any:
    """Return the function itself, or an `Operator` where no module has it under its own name."""
    inside = getattr(function, "__module__", None) == "torch._tensor"
    return Operator(function) if inside and function.__qualname__ != f"Tensor.{function.__name__}" else function


class BuiltValue:
    """A structure that is made anew for every micro-batch, from the tensors that stand in it."""

    __name__, __module__ = "made", "pipeback"

    def __init__(self, form: Form) -> None:
        self.expects = form
        self.form = form._replace(constants=tuple(UNSEEN if c is ABSENT else c for c in form.constants))

    def __call__(self, *tensors: Any) -> Any:
        return self.form.fill(tensors)


def argument(script: Script, filled: Callable[[Any], Any], value: Any, changes: bool) -> Any:
    """Return an argument of a call, with names of the script for its tensors, or one name for the whole structure.

    filled: returns the name for a `Ref` or a weight, and any other constant itself. changes: whether the call may
    change the structure.
    """
    kind = type(value)
    if kind in SINGLE:
        return filled(value)
    if not changes and (kind is tuple or kind is list):
        return kind([argument(script, filled, part, False) for part in value])
    leaves, spec = pytree.tree_flatten(value)
    leaves = [filled(leaf) for leaf in leaves]
    if not changes and _plain(spec):
        return pytree.tree_unflatten(leaves, spec)
    names = [leaf for leaf in leaves if type(leaf) is Name]
    numbers = iter(range(len(names)))
    constants = tuple(Ref(next(numbers)) if type(leaf) is Name else leaf for leaf in leaves)
    return script.call(BuiltValue(Form(spec, constants, True)), names)


def _plain(spec: pytree.TreeSpec) -> bool:
    """Whether a structure consists of tuples, lists, dictionaries and sizes alone."""
    return spec.type in (None, tuple, list, dict, torch.Size) and all(map(_plain, spec.children()))


def in_a_row(*values: Any) -> tuple[Any, ...]:
    """Return the values as a tuple."""
    return values


def same(value: Any) -> Any:
    """Return the value itself."""
    return value


def as_weight(carried: torch.Tensor) -> torch.Tensor:
    """Return a weight of an earlier stage as a product takes it.

    Without a graph, too, torch chooses the kernel of a product by whether its weight requires a gradient.
    """
    if torch.is_grad_enabled() or not carried.is_floating_point():
        return carried
    return carried.detach().requires_grad_()


def without_gradient(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function under torch.no_grad() and return its output."""
    with torch.no_grad():
        return function(*args, **kwargs)
