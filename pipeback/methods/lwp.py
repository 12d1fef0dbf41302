"""Linear weight prediction (LWP).

    velocity form   F on ŵ = w_t − η·T·v_t
    weight form     F on ŵ = w_t + T·(w_t − w_{t−1})        B on w_t        w ← step(w, g)        T = D by default

The forward (F) runs on a prediction of the weights to which its gradient will be applied, which assumes that they keep
moving as they do now; the backward (B) runs on the newest weights. Both forms agree for momentum SGD at a constant
rate; the weight form works with every optimizer. D is the stage's delay in updates, η the rate that was in force when
the micro-batch was pushed, and v torch's momentum buffer, which is 0 before the first step.

Kosson et al., arXiv 2003.11666, section 3.2. Weight copies: 1 and a scratch buffer; the weight form keeps one more copy
as state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.momentum import LWP_OF_WEIGHTS, check_horizon, require_momentum_sgd, velocity
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class LinearWeightPrediction(Method):
    """form: "velocity" or "weight". horizon: T in updates; None: the stage's delay D. slack: 2 as published."""

    form: Literal["velocity", "weight"] = "velocity"
    horizon: float | None = None
    slack: int = 2

    def __post_init__(self) -> None:
        if self.form not in ("velocity", "weight"):
            raise ValueError(f'lwp: form must be "velocity" or "weight", but is {self.form!r}')
        check_horizon("lwp", self.horizon)
        self.schedule = flowing(self.slack)
        self.copies = "scratch"
        self.state_copies = int(self.form == "weight")
        self.merges, self.reads_rates = True, False

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        if self.form == "velocity":
            require_momentum_sgd(optimizer, 'lwp with form="velocity"', LWP_OF_WEIGHTS)

    def init(self, weights: Weights) -> State:
        if self.form == "velocity":
            return {"velocity": [None] * len(weights)}
        return {"displacement": [torch.zeros_like(w) for w in weights]}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        if self.form == "velocity":
            return Shift(weights, self._ahead(when), state["velocity"])
        return Shift(weights, self._horizons(when), state["displacement"])

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        if self.form == "velocity":
            optimizer.step()
            v = velocity(optimizer, weights)
            return state if v is state["velocity"] else {"velocity": v}
        moved = state["displacement"]  # becomes w_{t+1} − w_t without a further copy of the weights
        torch._foreach_copy_(moved, weights)
        optimizer.step()
        torch._foreach_neg_(moved)
        torch._foreach_add_(moved, weights)
        return state

    def correction(self, when: When, state: State) -> Correction | None:
        if self.form == "velocity":
            return Correction(self._ahead(when))
        return Correction(self._horizons(when), drift=[0.0] * len(when.delays), along="displacement")

    def _ahead(self, when: When) -> list[float]:
        return [-rate * T for rate, T in zip(when.rates, self._horizons(when), strict=True)]

    def _horizons(self, when: When) -> Sequence[float]:
        return when.delays if self.horizon is None else [self.horizon] * len(when.delays)
