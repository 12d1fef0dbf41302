"""Rank runner: the runtime of one rank. Its loop runs in a thread, and its neighbours are other processes.

Losses and the outputs of evaluations go from the last rank to every other one, where a second thread receives them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch import Tensor

from pipeback.distributed.health.health import script_error
from pipeback.distributed.ranks import Ranks
from pipeback.errors import RankError
from pipeback.runtime.lazy_loss import LazyLoss, all_known
from pipeback.runtime.link import Closed, Name, Wire
from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import Command, Read, Threads, deliver, mean
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage

# Losses that nobody waits for are sent together: to send and receive them one by one would cost more than computing
# them.
MOST = 16  # the most losses in one message, as long as the last rank need not wait for anything
NAP = 0.05  # seconds between two looks of another rank


class RankRunner:
    """Runs this rank's part of a pipeline.

    results: the wires for losses and outputs, from the last rank to every other rank.
    """

    def __init__(
        self, loop: Loop, owner: list[int], ranks: Ranks, results: Sequence[Wire], closed: threading.Event
    ) -> None:
        self.ranks, self.results, self.closed, self.owner, self.loops = ranks, list(results), closed, owner, [loop]
        self.outputs: dict[int, Future[Value]] = {}
        self.relays = 0
        self.thread = Threads([loop], owner, closed, check=ranks.health.check)
        loop.worker.began = ranks.health.working
        # pushed micro-batches are done before the script ends and its rank leaves
        self.at_exit = Finalize(None, _finish, args=(weakref.ref(self),), exitpriority=20)
        self.last = ranks.index == ranks.count - 1
        self.judge = ranks.line[-1]
        self.listener: threading.Thread | None = None
        self.wanted = threading.Event()  # set while somebody waits for a loss or an output
        self.losses: list[Tensor] = []  # losses that were not sent yet, in order
        self.newest = -1
        if self.last:
            keep = loop.worker.report

            def report(mb: int, loss: Any) -> None:
                keep(mb, loss)
                if loop.worker.stages[loop.worker.count - 1].judges:
                    self.losses.append(loss)
                    self.newest = mb
                    if len(self.losses) == MOST:
                        self._send_losses()

            loop.worker.report = report
            link: Any = loop.worker.link
            link.blocked = self._send_losses
        else:
            self.listener = threading.Thread(target=self._listen, daemon=True, name="pipeback losses")
            self.listener.start()

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        self.ranks.health.pushed = first + len(batches)
        futures: list[Future[Tensor]] = [Future() for _ in batches]
        self.thread.futures.update(zip(range(first, first + len(batches)), futures, strict=True))
        self.tell(lambda loop: loop.push(batches, options))
        return lambda sizes: LazyLoss(
            lambda: mean([self._result(f, "a loss") for f in futures], sizes), partial(all_known, futures)
        )

    def forward(self, mb: int, xs: Sequence[Value], options: Options, expected: int) -> list[Value]:
        """Run F (forward) of micro-batches whose loss is computed outside; outputs on the last rank, else None."""
        self.ranks.health.pushed = mb + len(xs)
        outputs: list[Future[Any]] = [Future() for _ in xs]
        if self.last:
            self.thread.futures.update(enumerate(outputs, mb))
        self.tell(lambda loop: loop.forward(xs, options, expected))
        return [self._result(output, "the output") if self.last else None for output in outputs]

    def backward(self, gradients: Sequence[Value]) -> None:
        self.tell(lambda loop: loop.backward(gradients))

    def step(self, flush: bool) -> None:
        """Begin the updates that are due, without waiting for them. flush: whether they end a flush."""
        self.tell(Loop.drain if flush else Loop.settle)

    def wait(self) -> None:
        self.tell(Loop.rest)
        self.thread.join()
        for future in list(self.thread.futures.values()):  # losses that are still on their way
            self._result(future, "a loss")

    def drain(self) -> None:
        self.tell(Loop.drain)
        self.wait()

    def relay(self, x: Value, do: Callable[[Sequence[Stage], Value], Value], *, back: bool) -> Value:
        """Pass a value through the stages of all ranks. do: a rank's part. back: whether every rank gets the result."""
        number, self.relays = self.relays, self.relays + 1
        result: Future[Value] = Future()
        self.outputs[number] = result

        def part(loop: Loop) -> None:
            worker = loop.worker
            first, last = min(worker.stages), max(worker.stages)
            value = do(list(worker.stages.values()), worker.link.recv("E", first, number) if first else x)
            if last < worker.count - 1:
                worker.link.send("E", last + 1, number, value)
            elif back:
                self.outputs.pop(number).set_result(value)
                self._publish(("O", 0, number), value)

        self.tell(part)
        self.thread.join()
        if back:
            return self._result(result, "an output")
        self.outputs.pop(number, None)
        return None

    def close(self) -> None:
        self.at_exit.cancel()
        self.thread.close()
        for wire in (*self.results, *self._wires()):
            with suppress(Exception):
                wire.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _wires(self) -> list[Wire]:
        link: Any = self.loops[0].worker.link
        return [*link.out.values(), *link.into.values()]

    def tell(self, command: Command) -> None:
        """Send the loop's thread a command; an error in it ends all ranks."""

        def told(loop: Loop) -> None:
            failure: BaseException
            try:
                command(loop)
                return
            except Closed:
                raise
            except BaseException as error:
                failure = error
            finally:
                if self.thread.commands[0].empty():
                    self._send_losses()
                self.ranks.health.idle()
            cause = self.ranks.told(failure)
            raise cause from (None if cause is failure else failure)

        self.thread.tell(told)

    def _send_losses(self) -> None:
        if self.losses and threading.current_thread() is self.thread.threads[0]:
            losses, self.losses = tuple(self.losses), []
            self._publish(("L", 0, self.newest - len(losses) + 1), losses)

    def _publish(self, name: Name, value: Value) -> None:
        for wire in self.results:
            with suppress(ConnectionError):  # the receiver has ended its part
                wire.send(name, value)

    def _listen(self) -> None:
        keep = deliver(self.thread.futures)
        with suppress(Closed, ConnectionError, RankError):  # the threads that wait learn the reason by themselves
            while not self.closed.is_set():
                begin = time.monotonic()
                (kind, _, mb), value, _ = self.results[0].recv()
                if kind == "L":
                    for n, loss in enumerate(value, mb):
                        keep(n, loss)
                else:
                    self.outputs.pop(mb).set_result(value)
                if time.monotonic() - begin > NAP / 100:  # no loss was ready
                    self.wanted.wait(NAP)

    def _result(self, future: Future[Any], what: str) -> Any:
        """Return the value that the last rank sends; raise the error that has ended the pipeline meanwhile."""
        if future.done():
            return future.result()
        with self.ranks.health.waiting(self.judge, what):
            try:
                while True:
                    self.wanted.set()
                    with suppress(TimeoutError):
                        return future.result(timeout=0.2)
                    self.thread.raise_failure()  # `Health` judges how long this may last
            finally:
                self.wanted.clear()


def _finish(processes: weakref.ref[RankRunner]) -> None:
    own = processes()
    if own is not None and not own.closed.is_set() and script_error() is None:
        with suppress(Exception):  # `Health` or the loop has already reported the error
            own.wait()
