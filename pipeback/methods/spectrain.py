"""SpecTrain: speculative weights.

    v1   F on w_t − h_F·η·v        B on w_t − h_B·η·v        w ← step(w, g)
    v2   F on w_t − D·η·v          B on what F used

F is the forward and B the backward of a micro-batch i; D is the stage's delay in updates. In v1, a horizon h counts the
stage's updates that end after the operation starts and before B(i) starts on stage 0. So F and B of a micro-batch aim
at the same version at every stage, even at slack 0, where other methods predict nothing. η is the rate that was in
force when the micro-batch was pushed.

Chen et al., arXiv 1809.02839, section 3.2, and the code of the authors' lab (v2). Momentum SGD; PipeOptim's rule for
Adam is left out. Weight copies: 1, and a scratch buffer in v1, one more per micro-batch in flight in v2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.momentum import LWP_OF_WEIGHTS, require_momentum_sgd, velocity
from pipeback.schedules.programs import flowing
from pipeback.schedules.timeline import Horizon, horizons, in_flight


@dataclass(repr=False)
class SpecTrain(Method):
    """version: 1 as published; 2 keeps the prediction of the forward for the backward. slack: 1 as published."""

    version: Literal[1, 2] = 1
    slack: int = 1

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"spectrain: version must be 1 or 2, but is {self.version!r}")
        self.schedule = flowing(self.slack)
        self.copies = "scratch" if self.version == 1 else "stash"
        self.merges = self.version == 1 and self.slack > 0  # otherwise several stages have the same delay
        self.reads_rates = False

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_momentum_sgd(optimizer, "spectrain", LWP_OF_WEIGHTS)

    def held(self, stage: int, stages: int) -> int:
        if self.version == 1:
            return 2
        flying = in_flight(self.schedule, stages)[stage]
        return 1 + flying if flying > 1 else 1  # the last stage predicts nothing

    def init(self, weights: Weights) -> State:
        return {"velocity": [None] * len(weights)}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        return self._shifted(weights, state, self._ahead(when))

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        if self.version == 2:
            assert used is not None
            return used
        return self._shifted(weights, state, self._back(when))

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        optimizer.step()
        v = velocity(optimizer, weights)
        return state if v is state["velocity"] else {"velocity": v}

    def correction(self, when: When, state: State) -> Correction | None:
        if self.version == 1:
            return Correction(self._ahead(when), back=self._back(when))
        return Correction(self._ahead(when), used=True)

    def _ahead(self, when: When) -> list[float]:
        if self.version == 2:
            return [-rate * D for rate, D in zip(when.rates, when.delays, strict=True)]
        return [-rate * h.forward for rate, h in zip(when.rates, self._horizons(when), strict=True)]

    def _back(self, when: When) -> list[float]:
        return [-rate * h.backward for rate, h in zip(when.rates, self._horizons(when), strict=True)]

    def _horizons(self, when: When) -> list[Horizon]:
        """Return for each weight the horizons of its stage."""
        every = _horizons(self.slack, when.stages)
        return [every[when.stages - 1 - D // self.slack if self.slack else when.stage] for D in when.delays]

    def _shifted(self, weights: Weights, state: State, coefficients: list[float]) -> Chosen:
        return Shift(weights, coefficients, state["velocity"]) if any(coefficients) else weights


@cache
def _horizons(slack: int, stages: int) -> list[Horizon]:
    return horizons(flowing(slack), stages)
