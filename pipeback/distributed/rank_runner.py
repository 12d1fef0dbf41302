"""Rank runner: the runtime of one rank. Its loop runs in a thread, and its neighbours are other processes.

Losses and the outputs of evaluations go from the rank of the last stage to every other one, where a second thread
receives them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.util import Finalize
from typing import Any

from torch import Tensor

from pipeback.distributed.health.health import script_error
from pipeback.distributed.ranks import Ranks
from pipeback.errors import RankError, StageError
from pipeback.runtime.awaited import Awaited
from pipeback.runtime.lazy_loss import LazyLoss
from pipeback.runtime.link import Closed, Name, Wire
from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import Command, Read, Threads, Ticks, deliver, mean
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.tensors.structures import parts

# Losses that nobody waits for are sent together: to send and receive them one by one would cost more than computing
# them.
MOST = 16  # the most losses in one message, as long as the last rank need not wait for anything
NAP = 0.05  # seconds between two looks of another rank


class RankRunner:
    """Runs this rank's part of a pipeline.

    results: the wires for losses and outputs, from the rank of the last stage to every other rank.
    """

    def __init__(
        self, loop: Loop, owner: list[int], ranks: Ranks, results: Sequence[Wire], closed: threading.Event
    ) -> None:
        self.ranks, self.results, self.closed, self.owner, self.loops = ranks, list(results), closed, owner, [loop]
        self.ticks: Ticks | None = None  # where stages run as one and the loss is computed outside
        self.outputs: dict[int, Awaited] = {}  # by number of the relay
        self.relays = 0
        self.thread = Threads([loop], owner, closed, check=ranks.health.check)
        loop.worker.began = ranks.health.working
        link: Any = loop.worker.link
        link.bounds = lambda: (loop.worker.clip_norm, loop.worker.clip_value)
        # pushed micro-batches are done before the script ends and its rank leaves
        self.at_exit = Finalize(None, _finish, args=(weakref.ref(self),), exitpriority=20)
        self.last = ranks.index == owner[-1]
        self.judge = ranks.line[owner[-1]]
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
            link.blocked = self._send_losses
        else:
            self.listener = threading.Thread(target=self._listen, daemon=True, name="pipeback losses")
            self.listener.start()

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        self.ranks.health.pushed = first + len(batches)
        losses = Awaited(range(first, first + len(batches)))
        self.thread.awaited.update(dict.fromkeys(losses.keys, losses))
        self.tell(lambda loop: loop.push(batches, options))
        return lambda sizes: LazyLoss(lambda: mean(self._values(losses, "a loss"), sizes), lambda: losses.known)

    def forward(self, mb: int, xs: Sequence[Value], options: Options, expected: int) -> list[Value]:
        """Run F (forward) of micro-batches whose loss is computed outside; outputs on the last rank, else None."""
        self.ranks.health.pushed = mb + len(xs)
        outputs = Awaited(range(mb, mb + len(xs)))
        if self.last:
            self.thread.awaited.update(dict.fromkeys(outputs.keys, outputs))
        self.tell(lambda loop: loop.forward(xs, options, expected))
        return self._values(outputs, "the output") if self.last else [None] * len(xs)

    def backward(self, gradients: Sequence[Value]) -> None:
        self.tell(lambda loop: loop.backward(gradients))

    def step(self, flush: bool) -> None:
        """Begin the updates that are due, without waiting for them. flush: whether they end a flush."""
        self.tell(Loop.drain if flush else Loop.settle)

    def wait(self) -> None:
        self.tell(Loop.rest)
        self.thread.join()
        for losses in set(self.thread.awaited.values()):  # some are still on their way
            self._values(losses, "a loss")

    def drain(self) -> None:
        self.tell(Loop.drain)
        self.wait()

    def join(self) -> None:
        """Wait until this rank works on nothing."""
        self.thread.join()

    def raise_failure(self) -> None:
        self.thread.raise_failure()

    def relay(
        self,
        x: Value,
        do: Callable[[Sequence[Stage], Value], Value],
        *,
        back: bool,
        mb: int | None = None,
        y: Any = None,
    ) -> Value:
        """Pass a value through the stages of all ranks. do: a rank's part. back: whether every rank gets the result.
        mb: the micro-batch that an error in `do` is told to be of, as a `StageError`; None: it is told as it is.
        y: what every rank compares the result with, if it gets it; ranks whose x or y differ raise an error.
        """
        number, self.relays = self.relays, self.relays + 1
        result = Awaited([number])
        self.outputs[number] = result

        def part(loop: Loop) -> None:
            worker = loop.worker
            link: Any = worker.link
            if back:
                link.asked[number] = link.mark(number, x, tuple(leaf for leaf in parts(y) if isinstance(leaf, Tensor)))
            for run in _parts(sorted(worker.stages)):
                first, last = run[0], run[-1]
                value = worker.link.recv("E", first, number) if first else x
                with nullcontext() if mb is None else _of(mb):
                    value = do([worker.stages[s] for s in run], value)
                if last < worker.count - 1:
                    worker.link.send("E", last + 1, number, value)
                elif back:
                    self.outputs.pop(number).put(number, value)
                    self._publish(("O", 0, number), value)
            link.asked.pop(number, None)

        self.tell(part)
        self.thread.join()
        if back:
            return self._values(result, "an output")[0]
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
        keep = deliver(self.thread.awaited)
        with suppress(Closed, ConnectionError, RankError):  # the threads that wait learn the reason by themselves
            while not self.closed.is_set():
                begin = time.monotonic()
                (kind, _, mb), value, _ = self.results[0].recv()
                if kind == "L":
                    for n, loss in enumerate(value, mb):
                        keep(n, loss)
                else:
                    self.outputs.pop(mb).put(mb, value)
                if time.monotonic() - begin > NAP / 100:  # no loss was ready
                    self.wanted.wait(NAP)

    def _values(self, awaited: Awaited, what: str) -> list[Any]:
        """Return the values that the last rank sends; raise the error that has ended the pipeline meanwhile."""
        if awaited.known is not False:
            return awaited.values()
        with self.ranks.health.waiting(self.judge, what):
            try:
                while True:
                    self.wanted.set()
                    with suppress(TimeoutError):
                        return awaited.values(0.2)
                    self.thread.raise_failure()  # `Health` judges how long this may last
            finally:
                self.wanted.clear()


@contextmanager
def _of(mb: int) -> Iterator[None]:
    """A context whose errors are told to be of a micro-batch."""
    try:
        yield
    except StageError as error:
        error.micro_batch = mb
        raise
    except Exception as error:
        raise StageError(str(error), None, None, mb) from error


def _parts(stages: Sequence[int]) -> list[list[int]]:
    """The stages of a worker, cut where others hold those between.

    >>> _parts([0, 1, 4, 5])
    [[0, 1], [4, 5]]
    """
    found: list[list[int]] = []
    for s in stages:
        if found and found[-1][-1] == s - 1:
            found[-1].append(s)
        else:
            found.append([s])
    return found


def _finish(processes: weakref.ref[RankRunner]) -> None:
    own = processes()
    if own is not None and not own.closed.is_set() and script_error() is None:
        with suppress(Exception):  # `Health` or the loop has already reported the error
            own.wait()
