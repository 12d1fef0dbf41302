"""PipeOptim: prediction by the optimizer's own step; and XPipe.

    F on ŵ = w_t − η·D·d_t        B on what F used        w ← step(w, g)
    SGD: d = v        Adam, AdamW: d = m̂ / (√q̂ + ε)        RMSprop: d = g / (√q + ε)

The forward F runs on a prediction of the weights to which its gradient will be applied, if the optimizer went on as at
its last step; the backward B runs on the same prediction. Weight decay that is decoupled is left out of it. d is 0
before the first step, D is the stage's delay in updates, and η the rate that was in force when the micro-batch was
pushed.

XPipe (`micro_batches` = k > 1) makes one update for a group of k micro-batches. All micro-batches of a group run on the
prediction that was made for its first one, at the rate of the stage's last update.

Guan et al., arXiv 2312.00839, and their code, whose D is too large by one; XPipe: arXiv 1911.04610, as commonly
described. SGD, Adam, AdamW, RMSprop. Weight copies: 1, and one more per micro-batch in flight; d is one more copy as
state, and with XPipe the prediction of the group another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.direction import require_direction, step_along
from pipeback.methods.option_checks import require_real
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import flowing
from pipeback.schedules.timeline import in_flight


@dataclass(repr=False)
class OptimizerPrediction(Method):
    """slack: 1 as published. micro_batches: k of XPipe; 1: PipeOptim."""

    slack: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        self.schedule = flowing(self.slack, every=self.micro_batches)
        self.copies = "stash"
        self.grouped = self.micro_batches > 1
        self.state_copies = 1 + self.grouped
        self.merges = self.takes_rows = not self.grouped
        self.reads_moments = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_direction(optimizer, "pipeoptim")
        if not isinstance(optimizer, torch.optim.SGD):
            require_real(optimizer, "pipeoptim")

    def held(self, stage: int, stages: int) -> int:
        flying = in_flight(self.schedule, stages)[stage]
        return 1 + flying if self.delays(stages)[stage] else 1  # where there is no delay, nothing is predicted

    def init(self, weights: Weights) -> State:
        names = ("direction", "group") if self.grouped else ("direction",)
        return {name: [torch.zeros_like(w) for w in weights] for name in names}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        if not any(when.delays):
            return weights
        if not self.grouped:
            return Shift(weights, _ahead(when), state["direction"])
        i = when.mb - when.start
        k = self.micro_batches
        if when.version - when.base == _reads(self.schedule, when.stage, when.stages, k, i - i % k):
            return Shift(weights, [-when.delay] * len(weights), state["direction"])
        return Shift(weights, [1.0] * len(weights), state["group"])  # an update has come since the first one's F

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        if self.grouped and when.delay:  # direction: η·d, so that it has the rate of the last update; group: ŵ − w
            torch._foreach_copy_(state["group"], weights)
            torch._foreach_add_(state["group"], state["direction"], alpha=-when.delay)
        step_along(optimizer, weights, state["direction"], when.delays)
        if self.grouped and when.delay:
            stepped = [n for n, w in enumerate(weights) if w.grad is not None]
            if stepped:  # torch refuses an empty list, where all weights are frozen
                torch._foreach_mul_([state["direction"][n] for n in stepped], [when.rates[n] for n in stepped])
            torch._foreach_sub_(state["group"], weights)
        return state

    def correction(self, when: When, state: State) -> Correction | None:
        if self.grouped:
            return Correction([-float(D) for D in when.delays], used=True, along="direction", group="group")
        return Correction(_ahead(when), used=True, along="direction", own=True)


def _ahead(when: When) -> list[float]:
    return [-rate * D for rate, D in zip(when.rates, when.delays, strict=True)]


def _reads(schedule: Schedule, stage: int, stages: int, every: int, mb: int) -> int:
    """The updates that a stage has made before F(mb); every: micro-batches per update."""
    begin = _begin(schedule, stage, stages)
    rounds = max(0, -(-(mb + 1 - len(begin)) // every))
    return begin[mb - rounds * every] + rounds


@cache
def _begin(schedule: Schedule, stage: int, stages: int) -> list[int]:
    """The same for the first micro-batches, counted on the program until it repeats itself."""
    found, updates, program = list[int](), 0, schedule(stage, stages)
    while updates < 3:
        kind, _ = next(program)
        updates += kind == "U"
        if kind == "F":
            found.append(updates)
    return found
