"""Updates by group: makes the updates (U) of stages that update once in several micro-batches, between ticks.

At a tick all rows of a stack do F (forward) and B (backward), and the gradients are summed. A stage whose update is due
makes it as in the event loop, by its worker; at one tick these are a part of the stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.summed_step import SummedStep


class UpdatesByGroup:
    """The updates of the stages of `stacks`, and of other stages of the worker.

    every: micro-batches per update. slack: of the schedule. begins: the first micro-batch of a group.
    """

    def __init__(self, worker: Worker, stacks: Sequence[Stack], every: int, slack: int, begins: int) -> None:
        self.worker, self.every, self.slack, self.begins = worker, every, slack, begins
        self._of: dict[int, tuple[Stack, int]] = {}
        for stack in stacks:
            self._of |= {s: (stack, row) for row, s in enumerate(stack.numbers)}
            stack.plan.sum_up()
        for s, (stack, row) in self._of.items():
            self._take(stack, row, worker.stages[s])

    def _take(self, stack: Stack, row: int, stage: Stage) -> None:
        """Let the stage sum its gradients in a row of the stack's sums."""
        if not row:
            stack.sums.spread()
        own, rows = stage.gradients, [whole[row] for whole in self._wholes(stack)]
        own.hide()
        for place, g in zip(rows, own.values, strict=True):
            if g is None:
                place.zero_()
            elif g is not place:
                place.copy_(g)
        own.replace(list(rows))

    @staticmethod
    def _wholes(stack: Stack) -> list[torch.Tensor]:
        totals = stack.plan.totals
        return [t[None] for t in totals] if stack.alone else totals

    def done(self, ops: Ops, options: Callable[[int], Options]) -> None:
        """Note that stages have done B of these micro-batches; make the updates that are due. options: those of a
        micro-batch.
        """
        stages = self.worker.stages
        for s, i in ops:
            if s in self._of:
                stages[s].gradients.count_more(1)
                stages[s].went_backward(options(i))
        due = [(s, i) for s, i in ops if not (i + 1 - self.begins) % self.every]
        if due:
            self.worker.update(due)
            with torch.no_grad():
                for s, _ in due:
                    if s in self._of:
                        self._take(*self._of[s], stages[s])

    def step(self, step: AnyStep | None, stages: Sequence[Stage], f: Sequence[int], rounds: int) -> AnyStep | None:
        """Return the step of these stages where they have done so many rounds. f: of every stage of the pipeline, the
        micro-batch of F of the first one.
        """
        if not isinstance(step, SummedStep) or not step.renewed:
            return step
        return step.at(tuple(self._renewed(stage, f[stage.index] + rounds - self.begins) for stage in stages))

    def _renewed(self, stage: Stage, i: int) -> bool:
        """Whether a stage has updated since the group of a micro-batch began to go forward there."""
        ahead, every = self.slack * (stage.stages - 1 - stage.index), self.every
        return max(0, (i - ahead) // every) != max(0, (i - i % every - ahead) // every)

    def versions(self, stage: Stage, first: int, count: int) -> list[int]:
        """Return the versions on which a stage did the forwards of `count` rounds, from that on in which micro-batch
        `first` went backward, when they are over.
        """
        end = (first + count - self.begins) // self.every
        return [stage.version - end + (i - self.begins) // self.every for i in range(first, first + count)]

    def finish(self) -> None:
        """Let stages that have summed nothing since their last update hold no sums."""
        for s in self._of:
            own = self.worker.stages[s].gradients
            if not own.count:
                own.replace([None] * len(own.values))
