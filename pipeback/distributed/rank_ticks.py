"""Rank ticks: what one rank does in the order "skewed", for a loss that is computed outside of the pipeline.

The ticks run in the thread of the loop, and the loss is computed by the caller, on the rank of the last stage: its loop
hands each output over, and waits for the gradient. The calls of all other ranks return at once.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from pipeback.distributed.rank_runner import RankRunner
from pipeback.runtime.link import Closed
from pipeback.runtime.outside_ticks import Answer, LoopTicks
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options

PAUSE = 0.2  # seconds after which one who waits looks whether the pipeline has ended


class RankTicks:
    """Has the loop of a rank run its part of micro-batches that go through the stages in ticks."""

    def __init__(self, runner: RankRunner) -> None:
        self._runner, self._health = runner, runner.ranks.health
        self._ticks = LoopTicks(runner.loops[0])
        self._ticks.judge, self._ticks.newest = self._answered, self._hand
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # gradients, or what the caller has raised

    @property
    def judges(self) -> bool:
        """Whether losses are asked for on this rank."""
        return self._runner.last

    def forward(self, xs: Sequence[Value], options: Options, expected: int, judge: Answer) -> Value:
        """Let these micro-batches in; on the rank of the last stage have all but the newest judged, and return the
        output of that one.
        """
        self._health.pushed += len(xs)
        self._runner.tell(lambda loop: self._ticks.forward(xs, options, expected))
        for n in range(len(xs) if self.judges else 0):
            output = self._next()
            if n + 1 == len(xs):
                return output
            try:
                self._answers.put(judge(n, output))
            except BaseException as error:
                self._answers.put(_Raised(error))
                raise
        return None

    def backward(self, gradients: Sequence[Value]) -> None:
        """Take the gradient of the newest."""
        self._runner.tell(lambda loop: self._ticks.backward(*gradients))

    def step(self, flush: bool) -> None:
        self._runner.tell(lambda loop: self._ticks.step(flush))

    def _hand(self, output: Any) -> None:
        self._health.idle()  # what goes on now is the caller's
        self._outputs.put(output)

    def _answered(self, n: int, output: Any) -> Value:
        """The gradient of an output, in the thread of the loop."""
        self._hand(output)
        while not self._runner.closed.is_set():
            try:
                answer = self._answers.get(timeout=PAUSE)
            except queue.Empty:
                continue
            if isinstance(answer, _Raised):
                raise answer.error
            return answer
        raise Closed

    def _next(self) -> Any:
        """The next output, in the caller's thread."""
        with self._health.waiting(self._runner.judge, "the output"):
            while True:
                try:
                    return self._outputs.get(timeout=PAUSE)
                except queue.Empty:
                    self._runner.raise_failure()


class _Raised:
    """An error of the caller, in place of a gradient."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
