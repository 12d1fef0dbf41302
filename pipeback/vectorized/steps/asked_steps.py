"""Asked steps: asks the method of a pipeline for its corrections of the step of some stages at a tick.

F is the forward, B the backward, U the update, each of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any

from pipeback.methods.base import HOOKS, Correction, When, overrides
from pipeback.runtime.worker import Worker
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_plan import Asked, StepPlan

NUMBERS = ("ahead", "late", "back", "drift", "rates")


class AskedSteps:
    """The steps that the method of `worker` asks for."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._corrects = any(overrides(worker.method, hook) for hook in HOOKS)
        told = worker.method.correction(When(0, 1, 0, 0, 0), {})
        self.along = "" if told is None else told.along  # the name of δ in the state of stages
        self._groups: dict[int, StageGroup] = {}  # of one stage each: a group may count steps

    def step(self, plan: StepPlan, fore: Sequence[Options], back: Sequence[Options], updates: int) -> AnyStep | None:
        """Return the step of the stages of a plan; None if their rows cannot be stepped at once.

        fore, back: per stage, the options of F, and of B and U. updates: those that its state does not know of.
        """
        # stages that make their own updates know of them
        correction = partial(self._correction, plan.stages, fore, back, 0 if plan.totals else updates)
        asked = Asked(self.worker.method, self.worker.delays, correction) if self._corrects else None
        return plan.summed(asked, *back, *fore) if plan.totals else plan.step(back, asked, *fore)

    def _correction(
        self, stages: Sequence[Stage], fore: Sequence[Options], back: Sequence[Options], updates: int
    ) -> Correction:
        """Return the method's corrections for F at the options `fore`, and for B and U at the options `back`."""
        if self.worker.method.merges:
            return self._asked(stages, fore, back, updates)
        each = [self._asked([s], [a], [b], updates) for s, a, b in zip(stages, fore, back, strict=True)]
        numbers: dict[str, Any] = {name: [number for one in each for number in getattr(one, name)] for name in NUMBERS}
        one = each[0]
        return one._replace(**numbers, varies=any(other.varies for other in each))

    def _asked(
        self, stages: Sequence[Stage], fore: Sequence[Options], back: Sequence[Options], updates: int
    ) -> Correction:
        """Return the corrections for these stages, from one call of the method."""
        worker, first = self.worker, stages[0]
        if len(stages) > 1:
            group = StageGroup(stages, worker.delays)
        else:
            group = self._groups[first.index] = self._groups.get(first.index) or StageGroup(stages, worker.delays)
        state = worker.method.advanced(group.state, updates)
        found = [
            worker.method.correction(group.when(0, options, worker.start, worker.base, 0), state)
            for options in ([fore, back] if any(map(is_not, fore, back)) else [back])
        ]
        ahead, then = found[0], found[-1]
        assert ahead is not None and then is not None
        return then._replace(ahead=ahead.ahead)
