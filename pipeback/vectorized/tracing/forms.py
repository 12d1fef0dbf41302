"""Forms: what the graphs of stages that run as one are made for, and how values are taken apart into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.tensors import accelerators

Shape = tuple[int, ...]


class Kind(NamedTuple):
    """What the micro-batches of one form have in common at a stage.

    inputs: shape and dtype of each tensor that enters the stage. packed: whether they come as a tuple. mode: 1 in
    training, plus 2 for every change in what the modules compute. casts: the autocast around the modules.
    """

    inputs: tuple[tuple[Shape, torch.dtype], ...]
    packed: bool
    mode: int
    casts: accelerators.Autocast = ()

    def written(self) -> list[Any]:
        """Return the kind as JSON."""
        names = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in self.inputs]
        return [names, self.packed, self.mode, accelerators.written(self.casts)]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Kind:
        """Return the kind that was written so."""
        names, packed, mode, *casts = plain  # earlier states have no autocast
        inputs = tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in names)
        return cls(inputs, packed, mode, accelerators.read(*casts) if casts else ())


def leaves(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors of what crosses a boundary between stages."""
    return value if type(value) is tuple else (value,)


def packed(tensors: Sequence[Any], whole: bool) -> Any:
    """Return tensors as the value that crosses a boundary. whole: whether that is a tuple."""
    return tuple(tensors) if whole else tensors[0]


def floating(dtype: torch.dtype) -> bool:
    """Whether tensors of this type have gradients."""
    return dtype.is_floating_point or dtype.is_complex
