"""Cuts: which part of a weight each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """A weight cut along `dim` into equal shards, one per rank.

    parts  blocks of equal size along `dim` that are cut each by itself, as query, key and value in one matrix are:
           then every rank has its shard of each of them
    """

    dim: int
    parts: int = 1

    def shard(self, whole: Tensor, index: int, count: int) -> Tensor:
        """The shard of rank `index` of `count`."""
        blocks = [block.chunk(count, self.dim)[index] for block in whole.chunk(self.parts, self.dim)]
        return (
            torch.cat(blocks, self.dim) if len(blocks) > 1 else blocks[0].clone(memory_format=torch.contiguous_format)
        )

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """The weight from the shards of all ranks."""
        each = [shard.chunk(self.parts, self.dim) for shard in shards]
        return torch.cat([shard[p] for p in range(self.parts) for shard in each], self.dim)

    def shape(self, whole: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of a shard."""
        sizes = list(whole)
        sizes[self.dim] //= count
        return tuple(sizes)
