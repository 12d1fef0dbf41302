"""Outside ticks: the event loop in the order "skewed", for a loss that is computed outside of the pipeline.

Micro-batches follow each other through the stages, one tick apart. When one has left the last stage, its loss is asked
for at once, since that stage's backward is part of the same tick; except for the newest:

    forward    ticks until the newest micro-batch has come to the last stage; F (forward) of that stage alone
    backward   takes the gradient of its output
    step       the ticks that are left, of which the first goes on with B (backward) of the last stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import FEW, EventLoop, Read
from pipeback.schedules.flushes import in_flushes
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options

Answer = Callable[[int, Any], Value]  # of those that went forward together: (its place, its output) -> its gradient


class OutsideTicks(EventLoop):
    """Runs micro-batches in ticks, a forward and a backward of which the loss is computed outside."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._mbs = range(0)  # those that went forward together
        self._judge: Answer | None = None
        self._output: Any = None  # of the newest
        loop.worker.report = self._left

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        raise AssertionError("a pipeline whose loss is computed outside refuses push")

    def forward(self, xs: Sequence[Value], options: Options, expected: int, judge: Answer) -> Value:
        """Let these micro-batches in, have all but the newest judged, and return the output of that one."""
        loop, worker, order = self.loop, self.loop.worker, self.loop.order
        loop.reach(_never)
        self._judge, self._mbs = judge, loop.enter(xs, options, expected)
        if not self._flushed() and not self._in_turn():
            worker.run(order.advance(self._mbs.stop, order.at_last))
            worker.executor.land()
            early = worker.last, self._mbs[-1]
            worker.forward([early])
            worker.early = early
        output, self._judge, self._output = self._output, None, None
        return output

    def _flushed(self) -> bool:
        """Do these micro-batches in whole flushes, all but the end of the last one; return whether it was done."""
        loop, order, mbs = self.loop, self.loop.order, self._mbs
        schedule = self.loop.method.schedule_at(order.start, loop.pushed)
        found = in_flushes(schedule)
        if found is None or not order.empty or len(mbs) % found.every or (mbs.start - order.start) % found.every:
            return False
        last = mbs.stop - found.every
        if last > mbs.start:
            loop.worker.run(order.advance(last))
        if not loop.worker.executor.begin_flush(last, found.every, schedule):
            return False
        order.arrived = mbs.stop  # what goes on next ends the flush
        return True

    def _in_turn(self) -> bool:
        """Let these micro-batches, if they are few, go through all stages one by one, the newest as far as its loss;
        return whether that was done.
        """
        loop, order, mbs = self.loop, self.loop.order, self._mbs
        order.in_turn = len(mbs) <= FEW
        if not order.in_turn:
            return False
        if len(mbs) > 1:
            loop.worker.run(order.advance(mbs[-1]))
        if order.turns(mbs.stop) is None or not loop.worker.executor.begin_turn(order):
            order.in_turn = False
            return False
        order.arrived = mbs.stop
        return True

    def backward(self, gradients: Sequence[Value]) -> None:
        """Take the gradient of the newest."""
        (gradient,) = gradients
        self.loop.worker.link.send("B", self.loop.worker.last, self._mbs[-1], gradient)

    def step(self, flush: bool) -> None:
        self.loop.drain() if flush else self.loop.reach(_never)

    def _left(self, mb: int, output: Any) -> None:
        if mb == self._mbs[-1]:
            self._output = output
            return
        assert self._judge is not None
        with torch.enable_grad():
            gradient = self._judge(mb - self._mbs.start, output)
        self.loop.worker.link.send("B", self.loop.worker.last, mb, gradient)


def _never() -> bool:
    return False
