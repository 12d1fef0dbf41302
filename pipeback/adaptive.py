"""Adaptive: the step of Adam and AdamW over rows of weights, each row at a number of updates of its own.

g ← ∇f + λ·w (AdamW: w ← w − η·λ·w)        p ← β₁·p + (1 − β₁)·g        q ← β₂·q + (1 − β₂)·g²
w ← w − η/(1 − β₁ᵗ) · p / (√(q/(1 − β₂ᵗ)) + ε)        η, t: a number a row

Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101. To rounding it is torch.optim's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.joint import Options, groups_of
from pipeback.stage import Stage

PLAIN = ("amsgrad", "maximize", "capturable", "differentiable", "fused")  # options that must be off
FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"  # what torch keeps of a weight


class Settings(NamedTuple):
    """What all rows have in common. decays: λ of every weight."""

    betas: tuple[float, float]
    eps: float
    decoupled: bool
    decays: tuple[float, ...]


@dataclass
class Adaptive:
    """What all rows are stepped with. rates: η of every row, of every weight. like: the weights."""

    settings: Settings
    rates: list[list[float]]
    like: Sequence[Tensor]
    momentum, late, ahead = 0.0, None, ()

    def move(
        self,
        weights: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Tensor,
        grads: Sequence[Tensor],
    ) -> None:
        """Step weights (n, …). first, second: p and q. steps: updates done, (weights, n)."""
        (b1, b2), eps, decoupled, decays = self.settings
        steps += 1
        if any(decays):
            if decoupled:
                for w, rates, decay in zip(weights, self._columns, decays, strict=True):
                    w.mul_(1 - rates * decay)
            else:
                both = zip(grads, weights, decays, strict=True)
                grads = [torch.add(g, w, alpha=decay) if decay else g for g, w, decay in both]
        torch._foreach_lerp_(list(first), list(grads), 1 - b1)
        torch._foreach_mul_(list(second), b2)
        torch._foreach_addcmul_(list(second), list(grads), list(grads), 1 - b2)
        t = steps.double()
        roots, sizes = 1 / torch.sqrt(1 - b2**t), -1 / (1 - b1**t)
        for w, p, q, rates, root, size in zip(weights, first, second, self._columns, roots, sizes, strict=True):
            below = torch.sqrt(q).mul_(root.to(q).view_as(rates)).add_(eps)
            w.add_(p.div(below).mul_(rates * size.to(q).view_as(rates)))

    @cached_property
    def _columns(self) -> list[Tensor]:
        """η of every row, (n, 1, …)."""
        return [
            torch.tensor(some, dtype=w.dtype, device=w.device).view(-1, *[1] * (w.dim() - 1))
            for some, w in zip(self.rates, self.like, strict=True)
        ]


def settings(stage: Stage, options: Options) -> Settings | None:
    """What these options of a stage say, if its optimizer is plain Adam or AdamW."""
    if type(stage.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    decoupled = type(stage.optimizer) is torch.optim.AdamW
    common, decays = set(), []
    for group in groups_of(stage, options):
        if group is None or any(group.get(name) for name in PLAIN):
            return None
        if any(isinstance(v, Tensor) for v in (group["lr"], group["eps"], group["weight_decay"], *group["betas"])):
            return None
        common.add((tuple(group["betas"]), group["eps"], bool(group.get("decoupled_weight_decay", decoupled))))
        decays.append(group["weight_decay"])
    return Settings(*common.pop(), tuple(decays)) if len(common) == 1 else None
