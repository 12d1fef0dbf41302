"""Group norms: computes those of n stages side by side, each of one sample, as one group norm.

torch's own rule for `vmap` normalises without weights and multiplies and adds afterwards, which goes through all
activations two times more, and four times in the backward. Here the n·C channels are normalised in n·G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GroupNormsAsOne(TorchFunctionMode):
    """While it is active, group norms of one sample are batched so by `torch.func.vmap`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.group_norm:
            return _group_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if input.shape[0] != 1 or weight is None or bias is None:
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    found: Tensor = _GroupNorm.apply(input, weight, bias, num_groups, eps)
    return found


class _GroupNorm(torch.autograd.Function):
    """torch.group_norm with a rule for `vmap`; autograd differentiates what the rule calls."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        return torch.group_norm(x, groups, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, int]:
        n = info.batch_size
        x, weight, bias = (
            t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, weight, bias), dims, strict=False)
        )
        flat = x.reshape(1, n * x.shape[2], *x.shape[3:])  # (n, 1, C, …)
        y = torch.group_norm(flat, n * groups, weight.reshape(-1), bias.reshape(-1), eps)
        return y.reshape(x.shape), 0
