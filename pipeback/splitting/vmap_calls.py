"""Calls under torch.vmap: each is one call of a traced model, with the tensors that the function closes over as inputs.

The mask function of an attention layer often closes over the padding of the micro-batch. A stage creates such a
function anew, with the tensors of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn, vmap

from pipeback.private import pytree
from pipeback.tensors.structures import PLAIN, fixed


class _Refused(Exception):
    """A function cannot be taken apart."""


class TensorPlace:
    """Stands for a tensor that a function holds, by its number among these tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


class Mapped:
    """The call of a function under vmap: (tensors that it holds, arguments, keyword arguments) -> its output.

    options: in_dims, out_dims, randomness, chunk_size. modes: torch function modes that are active during the call.
    cure: what errors advise.
    """

    __name__, __module__ = "vmap", "pipeback"

    def __init__(self, function: Any, options: Sequence[Any], modes: Sequence[Any], cure: str) -> None:
        self.holds: list[Tensor] = []
        try:
            self.apart = _apart(function, self.holds, [])
        except _Refused as error:
            raise ValueError(f"a function under torch.vmap {error}; {cure}") from None
        self.options, self.modes = tuple(options), list(modes)

    @property
    def expects(self) -> Any:
        """A value to compare with another call's: its code, numbers and modules, and the places of its tensors."""
        return _told(self.apart), _told(self.options), [type(mode) for mode in self.modes]

    def __call__(self, holds: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        in_dims, out_dims, randomness, chunk_size = self.options
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            function = vmap(_made(self.apart, holds), in_dims, out_dims, randomness, chunk_size=chunk_size)
            return function(*args, **kwargs)


class Function:
    """A function taken apart: its code and the values that it holds."""

    def __init__(self, function: FunctionType, holds: Any) -> None:
        self.function, self.holds = function, holds

    def made(self, tensors: Sequence[Tensor]) -> FunctionType:
        old, (cells, defaults, by_keyword) = self.function, _made(self.holds, tensors)
        new = FunctionType(old.__code__, old.__globals__, old.__name__, defaults, tuple(map(CellType, cells)))
        new.__kwdefaults__ = by_keyword
        return new


class Partial:
    """A functools.partial taken apart."""

    def __init__(self, holds: Any) -> None:
        self.holds = holds

    def made(self, tensors: Sequence[Tensor]) -> Any:
        function, args, kwargs = _made(self.holds, tensors)
        return partial(function, *args, **kwargs)


def _apart(value: Any, tensors: list[Tensor], within: list[int]) -> Any:
    """Return a value that a function holds, with a `TensorPlace` for each tensor, which is added to `tensors`.

    within: ids of the values around it. Raises `_Refused` for objects whose tensors cannot be replaced, such as modules
    with weights, and for a value that contains itself.
    """
    inner: Callable[[Any], Any] = lambda x: _apart(x, tensors, [*within, id(value)])  # noqa: E731
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorPlace(len(tensors) - 1)
    if id(value) in within:
        raise _Refused("calls itself")
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return Function(value, inner([cells, value.__defaults__, value.__kwdefaults__]))
    if isinstance(value, partial):
        return Partial(inner([value.func, value.args, value.keywords]))
    if fixed(value) or isinstance(value, ModuleType) or (isinstance(value, nn.Module) and not _holds_tensors(value)):
        return value
    if not pytree.tree_is_leaf(value):
        return pytree.tree_map(inner, value)
    kind = type(getattr(value, "__self__", value)).__name__
    raise _Refused(f"holds {kind}, whose tensors would stay those of one micro-batch")


def _holds_tensors(module: nn.Module) -> bool:
    """Whether a module has weights, buffers or tensors as attributes."""
    own = [value for m in module.modules() for value in vars(m).values()]
    return any(isinstance(x, Tensor) for x in [*module.parameters(), *module.buffers(), *pytree.tree_leaves(own)])


def _made(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value with these tensors in the places."""

    def one(x: Any) -> Any:
        if isinstance(x, TensorPlace):
            return tensors[x.number]
        return x.made(tensors) if isinstance(x, (Function, Partial)) else x

    return pytree.tree_map(one, value)


def _told(value: Any) -> Any:
    """Return the output of `_apart` as values that are equal if the functions do the same."""
    if isinstance(value, TensorPlace):
        return TensorPlace, value.number
    if isinstance(value, Function):
        return Function, value.function.__code__, _told(value.holds)
    if isinstance(value, Partial):
        return Partial, _told(value.holds)
    if pytree.tree_is_leaf(value):
        return type(value), value
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    return spec, [_told(leaf) for leaf in leaves]
