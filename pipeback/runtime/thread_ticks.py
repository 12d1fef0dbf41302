"""Thread ticks: the order "skewed" of loops in threads, for a loss that is computed outside of the pipeline.

The loss is computed in the caller's thread: the loop of the last stage hands each output over, and waits for the
gradient. The loops of other stages go on meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from pipeback.runtime.link import Closed
from pipeback.runtime.loop import Loop
from pipeback.runtime.outside_ticks import LoopTicks
from pipeback.runtime.runners import Answer, Command
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options

PAUSE = 0.2  # seconds after which one who waits looks whether the pipeline has ended


class Teller(Protocol):
    """A runner whose loops run in other threads. closed: an event that ends the pipeline."""

    loops: list[Loop]
    closed: threading.Event

    def tell(self, command: Command) -> None: ...
    def raise_failure(self) -> None: ...


class ThreadTicks:
    """Has the loops of `runner` run their parts of micro-batches that go through the stages in ticks.

    came: told how many micro-batches have come. handed: called when an output is handed over. waiting: a context in
    which the caller waits for one. done: called when a part has been begun, to wait for its end; as given, nobody does.
    """

    def __init__(
        self, runner: Teller, *, came: Callable[[int], object] = lambda count: None,
        handed: Callable[[], object] = lambda: None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext, done: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._runner, self._came, self._handed, self._waiting, self._done = runner, came, handed, waiting, done
        self._ticks = {id(loop): LoopTicks(loop) for loop in runner.loops}
        for ticks in self._ticks.values():
            ticks.judge, ticks.newest = self._answered, self._hand
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @property
    def judges(self) -> bool:
        """Whether losses are asked for in this process."""
        return any(ticks.ends for ticks in self._ticks.values())

    def forward(self, xs: Sequence[Value], options: Options, expected: int, judge: Answer) -> Value:
        """Let these micro-batches in; where the last stage is, have all but the newest judged, and return the output
        of that one.
        """
        self._came(len(xs))
        self._runner.tell(lambda loop: self._ticks[id(loop)].forward(xs, options, expected))
        output = None
        for n in range(len(xs) if self.judges else 0):
            output = self._next()
            if n + 1 < len(xs):
                try:
                    self._answers.put(judge(n, output))
                except BaseException:
                    self._runner.closed.set()  # the loop waits for an answer that does not come
                    raise
        self._done()
        return output

    def backward(self, gradients: Sequence[Value]) -> None:
        """Take the gradient of the newest."""
        self._runner.tell(lambda loop: self._ticks[id(loop)].backward(*gradients))
        self._done()

    def step(self, flush: bool) -> None:
        """Do the ticks that are left. flush: whether they end a flush."""
        self._runner.tell(lambda loop: self._ticks[id(loop)].step(flush))
        self._done()

    def _hand(self, output: Any) -> None:
        self._handed()  # what goes on now is the caller's
        self._outputs.put(output)

    def _answered(self, n: int, output: Any) -> Value:
        """The gradient of an output, in the thread of the loop."""
        self._hand(output)
        while not self._runner.closed.is_set():
            with suppress(queue.Empty):
                return self._answers.get(timeout=PAUSE)
        raise Closed

    def _next(self) -> Any:
        """The next output, in the caller's thread."""
        with self._waiting():
            while True:
                try:
                    return self._outputs.get(timeout=PAUSE)
                except queue.Empty:
                    self._runner.raise_failure()
