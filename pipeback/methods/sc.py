"""Generalised spike compensation (SC).

    v ← m·v + g        w ← w − η·(a·v + b·g)        a = m^T,  b = (1 − m^T)/(1 − m)        T = D by default
    Adam, AdamW:       w ← w − η·(a·m̂ + b·g) / (√q̂ + ε)        a = β₁^T,  b = 1 − β₁^T

A gradient comes T updates late. What momentum would have done with it during those updates is done at once. T = 0 is
momentum SGD, and T = 1 is Nesterov's. Since a/(1 − m) + b = 1/(1 − m), the total effect of a gradient is unchanged.
The velocity v is that of momentum SGD, and the moments m and q are those of Adam, without the compensation; m̂ and q̂ are
corrected for their bias.

Kosson et al., arXiv 2003.11666, section 3.1; the form for Adam, whose first moment is an average and not a sum, is
ours. The forward F and the backward B run on w_t. Momentum SGD, Adam, AdamW. Weight copies: 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeback.methods.adam import adam_step, require_adam
from pipeback.methods.base import Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.momentum import LWP_OF_WEIGHTS, check_horizon, require_momentum_sgd, sgd_step
from pipeback.methods.option_checks import require_real
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class SpikeCompensation(Method):
    """horizon: T in updates; None: the stage's delay D. slack: 2 as published."""

    horizon: float | None = None
    slack: int = 2

    def __post_init__(self) -> None:
        check_horizon("sc", self.horizon)
        self.schedule = flowing(self.slack)
        self.merges, self.reads_rates = True, False
        self.steps_itself = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        if isinstance(optimizer, torch.optim.Adam):
            require_adam(optimizer, "sc")
            require_real(optimizer, "sc")
        else:
            require_momentum_sgd(optimizer, "sc", LWP_OF_WEIGHTS, positive=False)

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        late = self._late(when)
        if "betas" in optimizer.param_groups[0]:
            adam_step(optimizer, {id(w): T for w, T in zip(weights, late, strict=True)})
        else:
            sgd_step(optimizer, weights, late)
        return state

    def correction(self, when: When, state: State) -> Correction:
        return Correction(late=self._late(when))

    def _late(self, when: When) -> Sequence[float]:
        return when.delays if self.horizon is None else [self.horizon] * len(when.delays)
