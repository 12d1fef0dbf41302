"""Data sizes: finds sizes that depend on values: the calls that make them, and the places where a forward reads them.

`kept = h[mask]` has another size for every micro-batch, but tracing would record `len(kept)` as the number that it was
for the first. So every tensor that depends on such a call is marked, and reading its size becomes a check: a later
micro-batch with another size takes another variant or is refused; it never gets the number of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn.utils.rnn import pad_packed_sequence

from pipeback.tensors.structures import parts

# torch functions whose output has a size that depends on values
MAKERS = {
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave", "one_hot",
    "nms", "batched_nms", "_pack_padded_sequence", "_pad_packed_sequence", "compressed_view",
}  # fmt: skip
FACTORIES = {"arange", "zeros", "ones", "empty", "full", "linspace", "eye", "rand", "randn", "new_zeros", "new_ones"}
READERS = {"size", "stride", "__len__", "numel", "nelement"}
TELLING = {"shape", "nbytes"}  # properties that also tell a size


def makes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call gives a tensor whose size depends on values."""
    if name in MAKERS:
        return True
    if name == "__getitem__":
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in parts(args[1]))
    if name == "where":
        return len(args) + len(kwargs) == 1
    sizes = args[1:] if name.startswith("new_") else args
    return name in FACTORIES and any(isinstance(x, Tensor) for x in sizes)


def bounded(index: Any, number: Callable[[Tensor], int]) -> Any:
    """Return an index whose slices have numbers in place of tensors. number: reads a tensor, as int() does."""
    if isinstance(index, tuple):
        return tuple(bounded(part, number) for part in index)
    if not ends_at_tensors(index):
        return index
    return slice(*[number(end) if isinstance(end, Tensor) else end for end in (index.start, index.stop, index.step)])


def ends_at_tensors(value: Any) -> bool:
    """Whether a value is a slice with a tensor as its begin, end or step."""
    if type(value) is not slice:
        return False
    return isinstance(value.start, Tensor) or isinstance(value.stop, Tensor) or isinstance(value.step, Tensor)


def sizes(tensor: Tensor) -> list[int]:
    """Return the size of a tensor as a list, which is how a saved state holds it."""
    return list(tensor.shape)


def pads(caller: FrameType) -> bool:
    """Whether this is a call of pad_packed_sequence, which reads how long the longest sequence is."""
    return caller.f_code is pad_packed_sequence.__code__


def to_longest(caller: FrameType) -> bool:
    """Whether this call of pad_packed_sequence pads to the longest sequence."""
    return caller.f_locals.get("total_length") is None


def padded(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float) -> tuple[Tensor, Tensor]:
    """Return what pad_packed_sequence computes of a packed sequence: it padded to its longest one, and lengths."""
    found: tuple[Tensor, Tensor] = _VF._pad_packed_sequence(data, batch_sizes, batch_first, value, len(batch_sizes))
    return found
