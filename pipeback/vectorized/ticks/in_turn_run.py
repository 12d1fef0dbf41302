"""In-turn run: a steady run in which each micro-batch goes through all stages before the next one comes."""

from __future__ import annotations

from typing import Any

import torch

from pipeback.schedules.spans import TurnSpan
from pipeback.vectorized.buffers.waiting import Waiting
from pipeback.vectorized.ticks.in_turn import InTurn
from pipeback.vectorized.ticks.loss_stage import form
from pipeback.vectorized.ticks.output_stage import Left, OutputStage
from pipeback.vectorized.ticks.steady_run import SteadyRun


class InTurnRun:
    """The turns of `run`. key: the rings of its stacks. given: an input of the last stage, as all of this run are;
    None: none has come yet.
    """

    def __init__(self, run: SteadyRun, line: InTurn, key: tuple[Waiting, ...], given: Any) -> None:
        self.run, self.line, self.worker, self.key, self.given = run, line, run.worker, key, given
        self._begun: tuple[int, Left | None] | None = None  # a turn whose loss is computed outside now

    def go(self, span: TurnSpan, done: list[None]) -> None:
        """Run turns, and append to `done` for each; stop at what needs a new decision."""
        for _ in range(span.ticks):
            if self._begun is None and not self.begin(outside=False):
                return
            self._end()
            done.append(None)

    @property
    def begun(self) -> bool:
        """Whether the loss of a micro-batch is computed outside now."""
        return self._begun is not None

    def begin(self, *, outside: bool) -> bool:
        """Do F of the next micro-batch, at the last stage only if its loss is computed outside or it is no graph;
        return whether that was possible.
        """
        run, turn, worker, box = self.run, self.run.turns[0], self.worker, self.worker.link.box
        i, last = run.f[0] + turn.rounds, worker.last
        if not run.see() or run.steps(turn) is None or not self.line.fits(box["F", 0, i]):
            return False
        judge, target = turn.judge, [box["Y", last, i]] if worker.stages[last].judges else []
        if judge is not None and form(self.given, *target) != judge.form:
            return False
        if worker.began is not None:
            worker.began(("F", 0, i))
        with torch.no_grad():
            self.given = self.line.forward(i, turn.steps)
            left = None
            if outside and isinstance(judge, OutputStage):
                left = run.judging.ahead(judge, turn.steps[-1], i, self.given)
            else:
                worker.link.send("F", last, i, self.given)
        if judge is None:
            run.enter([(last, i)])
            worker.forward([(last, i)])
        self._begun = i, left
        return True

    def _end(self) -> None:
        """Do the rest of the turn that has begun."""
        run, turn, worker, last = self.run, self.run.turns[0], self.worker, self.worker.last
        assert self._begun is not None
        (i, left), self._begun, gx, judge = self._begun, None, None, turn.judge
        with torch.no_grad():
            if left is not None and isinstance(judge, OutputStage):
                gx = run.judging.back(judge, turn.steps[-1], i, left)
            elif judge is not None:
                gx = run.judging.whole(judge, turn.steps[-1], run.question(turn))
            self.line.back(i, run.b[last - 1] + turn.rounds, turn.steps, run.joint)
            run.joint.make()
            if judge is not None:
                worker.link.send("B", last - 1, i, gx)
        if judge is None:
            worker.backward([(last, i)])
            if run.groups is None:
                worker.update([(last, i)])
        run.update_groups(turn, range(worker.count))
        turn.rounds += 1
