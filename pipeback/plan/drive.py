"""Drive: lets micro-batches through the loop of a dry run, as a pipeline lets them through its own."""

from __future__ import annotations

from typing import Any

from pipeback.runtime.gone_ahead import Ahead
from pipeback.runtime.loop import Loop
from pipeback.runtime.outside_ticks import LoopTicks

_NOTHING: Any = None  # in place of a value: operations take time, but nothing is computed


def push(loop: Loop, pushed: int) -> None:
    """Push so many micro-batches."""
    loop.push([(_NOTHING, _NOTHING, 1)] * pushed, _NOTHING)


class Outside:
    """What drives a loop whose loss is computed outside. ticks: whether stages run as one."""

    def __init__(self, loop: Loop, *, ticks: bool) -> None:
        self.loop, self._ticks, self._ahead = loop, LoopTicks(loop) if ticks else None, Ahead(loop.method)

    def step(self, expected: int) -> None:
        """Let so many micro-batches through, as one call if that is possible, and make the updates that are due."""
        loop, xs = self.loop, [_NOTHING] * expected
        flushes = loop.method.flush_each_push
        if self._ticks is not None:
            self._ticks.forward(xs, _NOTHING, expected)
            self._ticks.backward(_NOTHING)
            self._ticks.step(flushes)
            return
        together = self._ahead.together(expected, loop.order.arrived, expected)
        for some in [xs] if together else [[x] for x in xs]:
            self._ahead.expect(expected)
            loop.forward(some, _NOTHING, expected)
            loop.backward(some)
            self._ahead.backward(len(some))
        loop.drain() if flushes else loop.settle()
        if flushes:
            self._ahead.restart()
