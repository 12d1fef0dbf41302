"""In place: finds calls that change tensors in place, and parameters that a forward writes into.

A teacher that follows its student (`p.mul_(m).add_(q, alpha=1 - m)`) is written into by every forward. Tracing and the
rehearsal must leave a model unchanged, so the values of such parameters are saved and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.private import identity, pytree
from pipeback.tensors.structures import PLAIN, fixed

OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
CHANGING = {"__setitem__", "__delitem__", "__set__", *[f"__i{name}__" for name in OPERATORS.split(" ")]}
PROPERTIES = {"data", "requires_grad"}  # properties of tensors that a forward may set


def changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function of that name may change what it is given."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in CHANGING or "out" in kwargs or bool(kwargs.get("inplace"))


def set_property(tensor: Tensor, name: str, value: Any) -> None:
    """Do `tensor.name = value`. A parameter's data is copied into its memory, which other tensors may share."""
    if name == "data" and isinstance(tensor, nn.Parameter) and tensor.shape == value.shape:
        tensor.data.copy_(value)
    else:
        setattr(tensor, name, value)


class Hooked:
    """Registers a function as a hook on the gradient of a tensor."""

    __name__, __module__ = "hooked", "pipeback"

    def __init__(self, function: Any) -> None:
        self.expects = function

    def __call__(self, tensor: Tensor) -> None:
        if tensor.requires_grad:  # not in evaluation, though it was traced with gradients
            tensor.register_hook(self.expects)


def stays(function: Any) -> bool:
    """Whether a function does the same for every micro-batch, as it holds nothing but numbers and modules."""
    if isinstance(function, MethodType):
        return isinstance(function.__self__, nn.Module)
    if not isinstance(function, FunctionType):
        return False
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return all(isinstance(x, (nn.Module, *PLAIN)) or fixed(x) or stays(x) for x in held)


class Kept:
    """The old values of parameters that are written into, and who writes into parameters and buffers.

    named: the parameters and buffers. tell: makes an error from the name of a trainable parameter. writes: the numbers
    of the calls that write, by the name of what they write into, through whatever alias.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], tell: Callable[[str], ValueError]) -> None:
        self._named, self._tell = list(named), tell
        self._by_memory: dict[int, list[tuple[str, Tensor]]] | None = None
        self._kept: dict[str, tuple[nn.Parameter, Tensor, Tensor]] = {}
        self.writes: dict[str, list[int]] = {}

    @property
    def names(self) -> set[str]:
        """The names of the parameters and buffers that were written into."""
        return set(self.writes)

    def look(self, changing: bool, sets: bool, args: Sequence[Any], kwargs: Mapping[str, Any], number: int) -> None:
        """Save the parameters that a torch function is about to change: its first argument, and `out`.

        changing: whether it changes its first argument. sets: whether it gives that other memory. number: of the call.
        """
        if not changing and not changes("", kwargs):
            return
        if self._by_memory is None:
            self._by_memory = {}
            for key, p in self._named:
                if p.layout is torch.strided:
                    self._by_memory.setdefault(identity(p), []).append((key, p))
        for x in pytree.tree_leaves((args[:1], kwargs.get("out"))):
            if isinstance(x, Tensor) and x.layout is torch.strided:
                try:
                    there = identity(x)
                except NotImplementedError:  # it stands for another within torch.func.grad, and has no memory
                    continue
                for key, p in self._by_memory.get(there, ()):
                    self.writes.setdefault(key, []).append(number)
                    if not isinstance(p, nn.Parameter):
                        continue
                    if sets and p.requires_grad:
                        raise self._tell(key)
                    if key not in self._kept:
                        self._kept[key] = p, p.data, p.detach().clone()

    def put_back(self) -> None:
        """Restore the memory and the values of all saved parameters."""
        for p, memory, value in self._kept.values():
            laid_back(p, memory, value)


@torch.no_grad()
def laid_back(p: nn.Parameter, memory: Tensor, value: Tensor) -> None:
    """Restore the memory of a parameter and its value."""
    if p.data_ptr() != memory.data_ptr():
        p.data = memory
    memory.copy_(value)


@torch.no_grad()
def settled(p: nn.Parameter, memory: Tensor) -> None:
    """Move the value of a parameter into the memory that it had, if it was given other memory."""
    if p.data_ptr() != memory.data_ptr():
        memory.copy_(p)
        p.data = memory
