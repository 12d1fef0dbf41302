"""Provenance: finds what the tensors of a forward are computed from: data, weights, both or neither.

Every operation is observed: its outputs depend on all of its inputs. So a function of the weights is recognised by how
it was computed, not by its values, which another tensor may have by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.private import TorchDispatchMode, identity

NEITHER, DATA, WEIGHTS = 0, 1, 2

# results, by number, that do not depend on all inputs of an operation: masks, and weights in one buffer
_APART = {"aten::native_dropout": {1: NEITHER}, "aten::_cudnn_rnn": {4: WEIGHTS}}


class Provenance(TorchDispatchMode):
    """A context that watches all operations in it. data: tensors from outside. weights: the trainable parameters.

    Provenance belongs to memory, so that all views of one memory have the same.
    """

    def __init__(self, data: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = {memory_of(t): DATA for t in data}
        self._weights: dict[int, list[tuple[int, int]]] = {}  # byte ranges by memory, which others may share
        for w in weights:
            begin = int(w.storage_offset()) * w.element_size()
            self._weights.setdefault(memory_of(w), []).append((begin, begin + int(w.nbytes)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation

    def lives(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a weight."""
        return memory_of(tensor) in self._weights

    def of(self, tensor: Tensor) -> int:
        """Return NEITHER, DATA, WEIGHTS or DATA | WEIGHTS."""
        places = self._weights.get(memory_of(tensor))
        if places is None:
            return self._of.get(memory_of(tensor), NEITHER)
        at = tensor.storage_offset() * tensor.element_size()
        return WEIGHTS if any(begin <= at < end for begin, end in places) else NEITHER

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, tuple(kwargs.values()))))
        sources = NEITHER
        if not _blank(func):
            for tensor in given:
                sources |= self.of(tensor)
        before = {memory_of(tensor) for tensor in given}
        output = func(*args, **kwargs)
        for tensor in written(func, args, kwargs):
            self._of[memory_of(tensor)] = self._of.get(memory_of(tensor), NEITHER) | sources
        apart = _APART.get(func._schema.name, {})
        for number, part in enumerate(output if isinstance(output, (list, tuple)) else (output,)):
            for tensor in _tensors(part):
                if memory_of(tensor) not in before:
                    self._of[memory_of(tensor)] = apart.get(number, sources)
        self.done(func, args, kwargs, output)
        return output

    def done(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Called after every operation."""


def _blank(func: Any) -> bool:
    """Whether the result of an operation depends on the shapes of its inputs alone."""
    name = func._schema.name.partition("::")[2]
    return name.endswith("_like") or name.startswith("new_") or name in ("bernoulli_", "normal_", "uniform_", "zero_")


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    if func._schema.is_mutable:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def memory_of(tensor: Tensor) -> int:
    """Return a number that all views of one memory, and no other tensors, share."""
    return identity(tensor) if tensor.layout is torch.strided else id(tensor)
