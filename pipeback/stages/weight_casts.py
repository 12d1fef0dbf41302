"""Weight casts: a saved tensor that is a weight in another type, or a view of one, told by its place in the graph.

    autocast:  y = linear(x, cast(w))        the graph of cast(w) is ToCopyBackward over w, and nothing else

Such a tensor names its weight itself, so that no operation of the forward has to be watched to find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class WeightCast(NamedTuple):
    """The recipe of such a tensor: the cast of all of the weight, and which part of it the tensor is."""

    weight: Tensor
    dtype: torch.dtype
    strides: Any  # of the cast
    size: Any
    stride: Any
    offset: int

    def make(self) -> Tensor:
        w = self.weight.detach()
        cast = torch.empty_strided(w.shape, self.strides, dtype=self.dtype, device=w.device).copy_(w)
        return cast.as_strided(self.size, self.stride, self.offset)


def cast_of(tensor: Tensor, weights: Mapping[int, Tensor]) -> WeightCast | None:
    """How a tensor that a graph saves is cast from one of these weights, by their `id`; None if it is not."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or base._version or type(node).__name__ != "ToCopyBackward0":
        return None
    weight = weights.get(id(getattr(node.next_functions[0][0], "variable", None)))
    if weight is None or base.device != weight.device:
        return None
    offset = int(tensor.storage_offset() - base.storage_offset())
    return WeightCast(weight, base.dtype, base.stride(), tensor.shape, tensor.stride(), offset)
