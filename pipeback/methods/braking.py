"""Adaptive braking (AB).

    g' = g·(1 − ρ·cos(g, v))        w ← step(w, g')        ρ = 2, at stages with D > 0

A late gradient that points along the velocity v is made smaller, or even turned round, since the velocity has already
gone where it points to; one that points against the velocity brakes it more. cos is the cosine of the angle between
all entries of a weight's gradient and of its velocity, which is torch's momentum buffer, or the first moment of Adam;
it is 0 where one of the two is 0. D is the stage's delay in updates. The forward F and the backward B run on w_t.

Venigalla, Kosson, Chiley and Köster, arXiv 2007.01397; the formula as commonly described, and stages without a delay
left alone. Momentum SGD, or an optimizer that keeps a first moment (Adam, AdamW, NAdam, RAdam). Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeback.methods.base import Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.columns import norm, positive, total
from pipeback.methods.gradients import gradients, replaced
from pipeback.methods.option_checks import check_number, require_real
from pipeback.schedules.programs import flowing

FIRST_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


@dataclass(repr=False)
class AdaptiveBraking(Method):
    """strength: ρ. slack: 2 for PB's delays."""

    strength: float = 2.0
    slack: int = 2

    def __post_init__(self) -> None:
        check_number("braking", "strength", self.strength)
        self.schedule = flowing(self.slack)
        self.merges = self.takes_rows = True
        self.elementwise = False

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_real(optimizer, "braking")
        if isinstance(optimizer, torch.optim.SGD):
            keeps = all(group["momentum"] for group in optimizer.param_groups)
        else:
            keeps = isinstance(optimizer, FIRST_MOMENTS)
        if not keeps:
            raise ValueError(
                f"braking compares gradients with a velocity, and {type(optimizer).__name__} keeps none; set "
                'momentum, take Adam, or use method="staleness_lr"'
            )

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        numbers, given = gradients(weights)
        moments = [_moment(optimizer, weights[n]) for n in numbers]
        late = [n for n, v in enumerate(moments) if v is not None and positive(when.delays[numbers[n]])]
        braked = [_braked(given[n], moments[n], self.strength, when.rows) for n in late]
        with replaced(weights, [numbers[n] for n in late], braked):
            optimizer.step()
        return state

    def correction(self, when: When, state: State) -> Correction:
        return Correction(own=True)


def _moment(optimizer: OptimizerLike, w: Tensor) -> Tensor | None:
    entry = optimizer.state.get(w, {})
    found: Tensor | None = entry.get("momentum_buffer", entry.get("exp_avg"))
    return found


def _braked(g: Tensor, v: Tensor | None, strength: float, rows: int) -> Tensor:
    assert v is not None
    a, b = norm(g, rows), norm(v, rows)
    cosine = torch.where((a > 0) & (b > 0), total(g / a * (v / b), rows), 0)
    return g * (1 - strength * cosine)
