"""Gradual magnitude pruning: from dense to sparse while training.

    s_t = s_f + (s_i − s_f)·(1 − (t − t_0)/(n·Δt))³        t = t_0, t_0 + Δt, …, t_0 + n·Δt
    m_l ← 1 at the (1 − s_t)·N_l largest |w_l| of those that survive

    s_i, s_f   sparsity at the start and at the end: 1 − `initial`, and 1 − d_l
    t_0        `start`, the first update at which weights may go
    Δt         `every`, updates between two prunings
    n          `steps`; after update t_0 + n·Δt the masks stay

Many weights go while there are many, few at the end. The cubic runs in each tensor to its own d_l.

Zhu & Gupta, arXiv 1710.01878, section 3, eq. 1. Left out: the return of a weight. The paper keeps the value that a
weight had when it was masked, and one that others have fallen below since may come back; here it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeback.sparsities.base import At, Sparsity, changing, check_count, check_share, magnitude
from pipeback.sparsities.masks import largest, survivors


@dataclass(repr=False, kw_only=True)
class Gradual(Sparsity):
    """density: the final one. initial: the first one; a tensor with a higher final one has that from the start."""

    steps: int
    every: int = 100
    start: int = 0
    initial: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "steps", self.steps)
        check_count(self, "every", self.every)
        check_count(self, "start", self.start, least=0)
        check_share(self, "initial", self.initial)

    @classmethod
    def derived(cls, updates: int) -> dict[str, Any]:
        """steps and every: the last pruning is after three quarters of the training, ten or more are before it."""
        until, every = changing(updates)
        return {"steps": until // every, "every": every}

    def density_at(self, update: int, final: float) -> float:
        """1 − s_t of a tensor whose final density is `final`."""
        first = max(self.initial, final)
        done = min(1.0, max(0.0, (update - self.start) / (self.steps * self.every)))
        return final + (first - final) * (1 - done) ** 3

    def masks(self, weights: Sequence[Tensor], densities: Sequence[float], at: At) -> list[Tensor]:
        return super().masks(weights, [max(self.initial, d) for d in densities], at)

    def due(self, update: int) -> bool:
        since = update - self.start
        return 0 <= since <= self.steps * self.every and since % self.every == 0

    def change(
        self,
        weights: Sequence[Tensor],
        masks: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        densities: Sequence[float],
        at: At,
    ) -> list[Tensor]:
        fresh = []
        for n, (w, mask, d) in enumerate(zip(weights, masks, densities, strict=True)):
            wanted = survivors(self.density_at(at.update, d), w.numel())
            fresh.append(largest(magnitude("weight", w, at, n, mask), min(wanted, int(mask.sum())), mask))
        return fresh
