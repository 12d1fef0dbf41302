"""Judging: what a run of ticks does with the last stage where it is a graph: F (forward), the loss, B (backward) and U
(update) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pipeback.runtime.worker import Worker
from pipeback.vectorized.stacks.eager_tick import drifted
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.row_clipping import RowClipping
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.sgd_rows import Step
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.output_stage import Left, OutputStage

Judge = LossStage | OutputStage
Asked = tuple[int, Any, Any]  # a micro-batch, the input and the target of its loss


class Judging:
    """The last stage of `worker`. judged: is called with every micro-batch and its loss, or its output where the loss
    is computed outside. along: the name of δ in the state of stages.
    """

    def __init__(self, worker: Worker, judged: Callable[[int, Any], None], joint: JointStep, along: str) -> None:
        self.worker, self.judged, self.joint, self.along = worker, judged, joint, along
        self._clipping = RowClipping(worker, [worker.last])

    def whole(self, judge: Judge, step: AnyStep, asked: Asked) -> Any:
        """Run the last stage. Returns the gradient of its input."""
        i, x, target = asked
        before = self.before(judge, step)
        if isinstance(judge, OutputStage):  # an error of who judges it is theirs
            gx, grads = judge.eager(x, step, partial(self._outside, i))
        else:
            try:
                loss, gx, grads = judge.eager(x, target, step)
            except Exception as error:
                raise self.worker.failure("forward", judge.stage, i, error) from error
            self.judged(i, loss)
        self._move(judge, before, step, grads)
        return gx

    def ahead(self, judge: OutputStage, step: AnyStep, i: int, x: Any) -> Left:
        """Do F, and show the output; return what waits for `back`."""
        output, left = judge.forward(x, step)
        self.judged(i, output)
        return left

    def back(self, judge: OutputStage, step: AnyStep, i: int, left: Left) -> Any:
        """Do B and U with the gradient that has come. Returns the gradient of the input."""
        before = self.before(judge, step)
        gx, grads = judge.backward(left, self.worker.link.recv("B", self.worker.last, i))
        self._move(judge, before, step, grads)
        return gx

    def _move(self, judge: Judge, before: Sequence[Tensor], step: AnyStep, grads: Sequence[Tensor]) -> None:
        grads = self._clipping.clip(judge.rows.whole, grads)
        if isinstance(step, Step) and not step.drift and self.joint.fits(judge.rows.whole, step):
            self.joint.add(judge.rows.whole, step, grads)
        else:
            judge.rows.whole.move(step, grads)
        self.drift(judge, before, step)

    @staticmethod
    def before(judge: Judge, step: AnyStep) -> list[Tensor]:
        """Return copies of the last stage's weights before they are stepped, if δ is to follow them."""
        return [w.clone() for w in judge.rows.stepped] if step.drift else []

    def drift(self, judge: Judge, before: Sequence[Tensor], step: AnyStep) -> None:
        """Let the last stage's δ follow its weights."""
        if step.drift:
            drifted(judge.rows.state(self.along), before, judge.rows.stepped, step.drift)

    def _outside(self, i: int, output: Any) -> Any:
        """Have the output of the last stage judged outside; return its gradient."""
        self.judged(i, output)
        return self.worker.link.recv("B", self.worker.last, i)
