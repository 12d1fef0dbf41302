"""Collectives that autograd differentiates.

The weights of a tensor-parallel stage are ordinary tensors, each rank's own shard, and not `DTensor`s: optimizers that
step several stages at once, kept versions, corrections and flat copies work on memory, which a DTensor hides. So the
collectives of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053, section 3) stand where the shards meet:

    replicate  f: identity forwards, sum over the ranks backwards       before a layer cut by columns
    reduce     g: sum over the ranks forwards, identity backwards       after a layer cut by rows
    assemble   shards side by side forwards, own shard backwards        where the whole output is needed

They are exact: sums run in the order of the ranks, so that weights that all ranks have stay equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pipeback.tensor_parallel.group import TensorGroup, group_of


def replicate(x: Tensor, group: TensorGroup) -> Tensor:
    """x, whose gradient is summed over the ranks."""
    found: Tensor = _Replicate.apply(x, group.number)
    return found


def reduce(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of x over the ranks; its gradient is that of every summand."""
    found: Tensor = _Reduce.apply(x, group.number)
    return found


def assemble(x: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """The ranks' shards side by side along `dim`, for computations that all ranks do alike."""
    found: Tensor = _Assemble.apply(x, dim, group.number)
    return found


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return group_of(ctx.number).sum(gradient), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        return group_of(number).sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Assemble(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, number: int) -> Tensor:
        ctx.dim, ctx.number = dim, number
        return torch.cat(group_of(number).gather(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = group_of(ctx.number)
        return gradient.chunk(group.count, ctx.dim)[group.index].contiguous(), None, None
