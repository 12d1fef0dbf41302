"""The combination that Kosson et al. recommend: LWP^v_D + SC_D.

    F on ŵ = w_t − η·D·v_t        B on w_t
    v ← m·v + g        w ← w − η·(a·v + b·g)        a = m^D,  b = (1 − m^D)/(1 − m)

F is the forward, B the backward of a micro-batch; D is the stage's delay in updates. The prediction uses v, not the
step with spike compensation. η in F is the rate that was in force when the micro-batch was pushed.

Kosson et al., arXiv 2003.11666, section 3.3 (MLSys 2021). Momentum SGD. Weight copies: 1 and a scratch buffer.
The method helps while D·(1 − m) ≪ 1, that is, with small updates and a momentum that is scaled to their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.momentum import LWP_OF_WEIGHTS, require_momentum_sgd, sgd_step, velocity
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class Cerebras(Method):
    """slack: 2 as published, for delays of 2·(S − 1 − s); 1 halves them."""

    slack: int = 2

    def __post_init__(self) -> None:
        self.schedule = flowing(self.slack)
        self.copies = "scratch"
        self.merges, self.reads_rates = True, False
        self.steps_itself = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_momentum_sgd(optimizer, "cerebras", LWP_OF_WEIGHTS)

    def init(self, weights: Weights) -> State:
        return {"velocity": [None] * len(weights)}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        return Shift(weights, _ahead(when), state["velocity"])

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        sgd_step(optimizer, weights, when.delays)
        v = velocity(optimizer, weights)
        return state if v is state["velocity"] else {"velocity": v}

    def correction(self, when: When, state: State) -> Correction:
        return Correction(_ahead(when), when.delays)


def _ahead(when: When) -> list[float]:
    return [-rate * D for rate, D in zip(when.rates, when.delays, strict=True)]
