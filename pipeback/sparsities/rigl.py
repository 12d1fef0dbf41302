"""RigL: the smallest weights move to where the gradient is largest.

    at the start:                    m_l random, or by magnitude, d_l·N_l survivors
    t mod ΔT = 0 and t < T_end:      k = round(f(t)·|m_l|)        f(t) = α/2·(1 + cos(t·π/T_end))
                                     drop the k survivors of smallest |w|
                                     m_l ← the rest, and the k of largest |g| that are not among the rest

    α          `fraction`, of the survivors that move at first
    ΔT         `every`, updates
    T_end      `until`; after it the masks stay. The paper's is about three quarters of the training
    g          the dense gradient of update t: after all other updates, that of the survivors is enough

Growth excludes the connections that are left after the drop, in the paper's words i ∉ θ \\ I_active. So what was just
dropped may be grown again if its gradient is among the largest; it then keeps its value and optimizer state, as in the
authors' published code. All others begin at 0 with fresh state.

Evci et al., arXiv 1911.11134, section 3, algorithm 1; α 0.3 and ΔT 100 are the paper's. Left out: the paper makes no
optimizer step at the updates that change masks; here the step is made, and |w| is read after it. The authors' code adds
noise of 1e-5 to |w|, of which the paper says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pipeback.sparsities.base import (
    At,
    Sparsity,
    changing,
    check_choice,
    check_count,
    check_share,
    magnitude,
    scattered,
)
from pipeback.sparsities.masks import largest


@dataclass(repr=False, kw_only=True)
class RigL(Sparsity):
    """initial: where the first survivors are, at "random" places or those of largest "magnitude"."""

    distribution: Literal["uniform", "erk"] = "erk"
    until: int
    every: int = 100
    fraction: float = 0.3
    initial: Literal["random", "magnitude"] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "until", self.until)
        check_count(self, "every", self.every)
        check_share(self, "fraction", self.fraction)
        check_choice(self, "initial", self.initial, "random", "magnitude")

    @classmethod
    def derived(cls, updates: int) -> dict[str, Any]:
        """until: three quarters of the training. every: a tenth of it if that is less than 100 updates."""
        until, every = changing(updates)
        return {"until": until, "every": every}

    def masks(self, weights: Sequence[Tensor], densities: Sequence[float], at: At) -> list[Tensor]:
        return (super().masks if self.initial == "magnitude" else scattered)(weights, densities, at)

    def due(self, update: int) -> bool:
        return 0 < update < self.until and update % self.every == 0

    def dense_gradient(self, update: int) -> bool:
        return self.due(update)

    def moved(self, update: int) -> float:
        """f(t): the share of the survivors that move."""
        return self.fraction / 2 * (1 + math.cos(math.pi * update / self.until))

    def change(
        self,
        weights: Sequence[Tensor],
        masks: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        densities: Sequence[float],
        at: At,
    ) -> list[Tensor]:
        fresh = []
        for n, (w, mask, g) in enumerate(zip(weights, masks, gradients, strict=True)):
            alive = int(mask.sum())
            k = round(self.moved(at.update) * alive)
            kept = largest(magnitude("weight", w, at, n, mask), alive - k, mask)
            fresh.append(kept | largest(magnitude("gradient", g, at, n, ~kept), k, ~kept))
        return fresh
