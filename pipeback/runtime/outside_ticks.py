"""Outside ticks: the event loop in the order "skewed", for a loss that is computed outside of the pipeline.

Micro-batches follow each other through the stages, one tick apart. When one has left the last stage, its loss is asked
for at once, since that stage's backward is part of the same tick; except for the newest:

    forward    ticks until the newest micro-batch has come to the last stage; F (forward) of that stage alone
    backward   takes the gradient of its output
    step       the ticks that are left, of which the first goes on with B (backward) of the last stage

Several workers do the same parts at the same time, each those of its own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import FEW, Answer, EventLoop, Read
from pipeback.schedules.flushes import in_flushes
from pipeback.schedules.order import Wave
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options


class LoopTicks:
    """The part that one loop has in it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.mbs = range(0)  # those that went forward together
        # where the loss of all but the newest is computed, and where the output of the newest goes
        self.judge: Answer
        self.newest: Callable[[Any], None]
        self.ends = loop.worker.last == loop.worker.count - 1  # whether the last stage is one of this loop's
        loop.worker.pauses = True
        if self.ends:
            loop.worker.report = self._left

    def forward(self, xs: Sequence[Value], options: Options, expected: int) -> None:
        """Let these micro-batches in, have all but the newest judged, and that one come out of the last stage."""
        loop, worker, order = self.loop, self.loop.worker, self.loop.order
        loop.reach(_never)
        self.mbs = loop.enter(xs, options, expected)
        if self._flushed() or (len(worker.stages) == worker.count and self._in_turn()):
            return
        worker.run(order.advance(self.mbs.stop, order.at_last))
        worker.land()
        if self.ends:
            early = worker.last, self.mbs[-1]
            worker.run([Wave("F", [early])])
            worker.early = early

    def backward(self, gradient: Value) -> None:
        """Take the gradient of the newest."""
        if self.ends:
            self.loop.worker.link.send("B", self.loop.worker.last, self.mbs[-1], gradient)

    def step(self, flush: bool) -> None:
        """Do the ticks that are left. flush: whether they end a flush."""
        self.loop.drain() if flush else self.loop.reach(_never)

    def _flushed(self) -> bool:
        """Do these micro-batches in whole flushes, all but the end of the last one; return whether it was done."""
        loop, order, mbs = self.loop, self.loop.order, self.mbs
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
        loop, order, mbs = self.loop, self.loop.order, self.mbs
        order.in_turn = len(mbs) <= FEW and loop.worker.residence.joins  # weights in a store would come for each
        if not order.in_turn:
            return False
        if len(mbs) > 1:
            loop.worker.run(order.advance(mbs[-1]))
        if order.turns(mbs.stop) is None or not loop.worker.executor.begin_turn(order):
            order.in_turn = False
            return False
        order.arrived = mbs.stop
        return True

    def _left(self, mb: int, output: Any) -> None:
        if mb == self.mbs[-1]:
            self.newest(output)
            return
        with torch.enable_grad():
            gradient = self.judge(mb - self.mbs.start, output)
        self.loop.worker.link.send("B", self.loop.worker.last, mb, gradient)


class OutsideTicks(EventLoop):
    """Runs micro-batches in ticks, a forward and a backward of which the loss is computed outside."""

    judges = True  # whether losses are asked for in this process

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._ticks = LoopTicks(loop)

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        raise AssertionError("a pipeline whose loss is computed outside refuses push")

    def forward(self, xs: Sequence[Value], options: Options, expected: int, judge: Answer) -> Value:
        """Let these micro-batches in, have all but the newest judged, and return the output of that one."""
        outputs: list[Any] = []
        self._ticks.judge, self._ticks.newest = judge, outputs.append
        try:
            self._ticks.forward(xs, options, expected)
        finally:
            del self._ticks.judge, self._ticks.newest
        return outputs[0]

    def backward(self, gradients: Sequence[Value]) -> None:
        """Take the gradient of the newest."""
        self._ticks.backward(*gradients)

    def step(self, flush: bool) -> None:
        self._ticks.step(flush)


def _never() -> bool:
    return False
