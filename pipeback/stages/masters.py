"""Masters: float32 copies of weights of a half type. The optimizer steps the copies, and the weights are rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

HALF = torch.bfloat16, torch.float16


class Masters:
    """The masters of the parameters `params` of a stage, if `wanted` and if some parameters are of a half type."""

    def __init__(self, params: Sequence[nn.Parameter], *, wanted: bool) -> None:
        self.params = params
        self.wanted = wanted and any(p.dtype in HALF for p in params)
        self.weights: list[Tensor] = []
        self.halves: list[Tensor] = []  # those of a half type, in the same order
        self._seen: list[int] = []

    def of(self, p: nn.Parameter) -> Tensor:
        """Return what the optimizer steps for a parameter: a weight on its storage, or a master."""
        return p.data.float() if self.wanted and p.dtype in HALF else p.data

    def pair(self, weights: Sequence[Tensor]) -> None:
        """Take as masters those of these weights whose type differs from their parameter's."""
        pairs = [(w, p) for w, p in zip(weights, self.params, strict=True) if w.dtype != p.dtype]
        self.weights, self.halves = [w for w, _ in pairs], [p.data for _, p in pairs]
        self.adopted()

    def let_go(self) -> None:
        """Drop all masters, since another rank holds the stage."""
        self.weights, self.halves = [], []

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into the weights of a half type."""
        if self.weights:
            torch._foreach_copy_(self.halves, self.weights)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy to the masters what was written from outside into weights of a half type (by their version counters)."""
        if [p._version for p in self.params] != self._seen:
            for w, half in zip(self.weights, self.halves, strict=True):
                w.copy_(torch.where(w.to(half.dtype) == half, w, half.float()))
            self.adopted()

    def adopted(self) -> None:
        """Note that the current values of the weights have been seen."""
        self._seen = [p._version for p in self.params]
