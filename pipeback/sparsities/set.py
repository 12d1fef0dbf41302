"""Sparse evolutionary training (SET): the smallest weights move to random places.

    at the start:            m_l random, or by magnitude, d_l·N_l survivors
    every Δt updates:        drop the round(ζ·|m_l|) survivors of smallest |w|
                             m_l ← the rest, and as many as were dropped, drawn among all that are zero then

    ζ          `fraction`
    Δt         `every`, updates

What was just dropped is zero then, and may be drawn again: it keeps its value, as if it had not been dropped. Random
numbers are a stream of their own for each tensor and update.

Mocanu et al., arXiv 1707.04780, algorithm 1; the paper's Δt is an epoch, its ζ 0.3. by_sign drops as the paper does:
the share ζ of the positive weights and the share ζ of the negative ones, each those nearest to 0 (0 is positive);
the default takes them together, as RigL's comparison with SET does. Left out: the last epoch's drop without regrowth,
and new values for regrown weights, which begin at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeback.sparsities.base import At, Sparsity, check_choice, check_count, check_share, magnitude, scattered
from pipeback.sparsities.masks import anywhere, largest


@dataclass(repr=False, kw_only=True)
class SparseEvolution(Sparsity):
    """initial: where the first survivors are, at "random" places or those of largest "magnitude"."""

    distribution: Literal["uniform", "erk"] = "erk"
    fraction: float = 0.3
    every: int = 100
    initial: Literal["random", "magnitude"] = "random"
    by_sign: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "fraction", self.fraction)
        check_count(self, "every", self.every)
        check_choice(self, "initial", self.initial, "random", "magnitude")
        check_choice(self, "by_sign", self.by_sign, False, True)

    def masks(self, weights: Sequence[Tensor], densities: Sequence[float], at: At) -> list[Tensor]:
        return (super().masks if self.initial == "magnitude" else scattered)(weights, densities, at)

    def due(self, update: int) -> bool:
        return update > 0 and update % self.every == 0

    def change(
        self,
        weights: Sequence[Tensor],
        masks: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        densities: Sequence[float],
        at: At,
    ) -> list[Tensor]:
        fresh = []
        for n, (w, mask) in enumerate(zip(weights, masks, strict=True)):
            size = magnitude("weight", w, at, n, mask)
            groups = [mask & (w >= 0), mask & (w < 0)] if self.by_sign else [mask]
            kept = torch.zeros_like(mask)
            for group in groups:
                alive = int(group.sum())
                kept |= largest(size, alive - round(self.fraction * alive), group)
            fresh.append(kept | anywhere(int(mask.sum()) - int(kept.sum()), ~kept, at.generator(n)))
        return fresh
