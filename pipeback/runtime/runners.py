"""Runners: where the loops of a pipeline run, as the event loop in the caller's thread or in one thread per worker.

A runner takes what was pushed and returns losses; the loops do the same in all runners.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeback.runtime.awaited import Awaited
from pipeback.runtime.lazy_loss import LazyLoss
from pipeback.runtime.link import Closed
from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.loss_vector import LossVector
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.tensors import accelerators

FEW = 8  # micro-batches of a push that go through all stages one by one, if their loss is awaited
Read = Callable[[list[int] | None], Tensor]  # samples per micro-batch (None: equal weights) -> mean loss of a push
Command = Callable[[Loop], Any]
Answer = Callable[[int, Any], Value]  # of those that went forward together: (its place, its output) -> its gradient


class Judge(NamedTuple):
    """What computes the gradients of outputs."""

    known: Answer  # without autograd; None where `asked` has to
    asked: Answer  # with an output that requires a gradient

    def answer(self, n: int, output: Any) -> Value:
        """As an `Answer`."""
        gradient = self.known(n, output)
        return self.asked(n, output) if gradient is None else gradient


class Runner(Protocol):
    """The interface between a pipeline and the place where it runs."""

    owner: list[int]  # the worker of each stage
    loops: list[Loop]  # those of this process

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read: ...
    def tell(self, command: Command) -> None: ...
    def wait(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class Ticks(Protocol):
    """What runs micro-batches in ticks where the loss is computed outside, in one thread, in several, or on a rank."""

    @property
    def judges(self) -> bool:
        """Whether losses are asked for in this process."""

    def forward(self, xs: Sequence[Value], options: Options, expected: int, judge: Answer) -> Value:
        """Let these micro-batches in, have all but the newest judged, and return the output of that one; None in
        processes without the last stage.
        """

    def backward(self, gradients: Sequence[Value]) -> None:
        """Take the gradient of the newest."""

    def step(self, flush: bool) -> None:
        """Do the ticks that are left. flush: whether they end a flush."""


class EventLoop(ABC):
    """The event loop: it runs every operation in the caller's thread."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.loops = loop, [loop]
        self.owner = [0] * loop.worker.count
        loop.inline = True
        self.closed = False
        # a context for what earlier pushes have left: weights need a gradient in it as they did then
        self.as_pushed: Callable[[], AbstractContextManager[object]] = nullcontext

    @abstractmethod
    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        """Admit micro-batches from number `first` on, and return what reads their mean loss."""

    def tell(self, command: Command) -> None:
        command(self.loop)

    def wait(self) -> None:
        with self.as_pushed():
            self.loop.rest()

    def drain(self) -> None:
        self.loop.drain()
        self.loop.rest()

    def close(self) -> None:
        self.loop.worker.residence.close()
        self.closed = True


class PushLoop(EventLoop):
    """The event loop in which a push does every operation that may run, so that its losses are there when it returns.

    It also runs micro-batches in two parts, a forward and a backward, where the loss is computed outside.
    """

    @contextmanager
    def _reporting(self, to: Callable[[int, Any], None]) -> Iterator[None]:
        """A context within which the last stage reports there, and after which it keeps nothing alive."""
        worker, before = self.loop.worker, self.loop.worker.report
        worker.report = to
        try:
            yield
        finally:
            worker.report = before

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        losses = LossVector(first, len(batches))
        with self._reporting(losses.put):
            self.loop.push(batches, options)
        if losses.come < losses.count:
            raise RuntimeError(
                f"the schedule holds {losses.count - losses.come} of the micro-batches {first} to "
                f"{first + losses.count - 1} back; a forward must not wait for later arrivals"
            )
        return losses.mean

    def forward(self, mb: int, xs: Sequence[Value], options: Options, expected: int) -> list[Value]:
        outputs: dict[int, Value] = {}
        with self._reporting(outputs.__setitem__):
            self.loop.forward(xs, options, expected)
        return [outputs[i] for i in range(mb, mb + len(xs))]

    def backward(self, gradients: Sequence[Value]) -> None:
        self.loop.backward(gradients)

    def forget(self, which: Collection[int], of: int) -> None:
        self.loop.forget(which, of)

    def step(self, flush: bool) -> None:
        self.loop.drain() if flush else self.loop.settle()


def weakly(method: Callable[[Callable[[], bool]], None]) -> Callable[[Callable[[], bool]], None]:
    """A method of an object that this reference does not keep alive."""
    held = weakref.WeakMethod(method)

    def call(done: Callable[[], bool]) -> None:
        there = held()
        if there is None:
            raise RuntimeError("the pipeline is gone, and with it what was pushed and not done")
        there(done)

    return call


class Commands(queue.Queue[Any]):
    """A queue of at most `depth` commands. A thread that waits for room is woken only once most of the queue is free,
    since switching threads costs more than handing over a command.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.room, self.most, self.taken = threading.Semaphore(depth), max(1, depth - 2), 0

    def offer(self, command: Command, seconds: float) -> bool:
        """Put a command, if there is room within `seconds`; return whether it was put."""
        there = self.room.acquire(timeout=seconds)
        if there:
            self.put(command)
        return there

    def take(self) -> Any:
        command = self.get()
        self.taken += 1
        if self.taken % self.most == 0:
            self.room.release(self.most)
        return command


class Threads:
    """One thread per worker, each with its own loop; commands go through bounded queues.

    closed: an event that ends the pipeline, at which links stop waiting. check: raises the errors of other ranks.
    """

    def __init__(
        self,
        loops: list[Loop],
        owner: list[int],
        closed: threading.Event,
        *,
        depth: int = 8,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.loops, self.owner, self.closed, self.check = loops, owner, closed, check
        self.ticks: Ticks | None = None  # where stages run as one and the loss is computed outside
        self.commands = [Commands(depth) for _ in loops]
        self.awaited: dict[int, Awaited] = {}  # the losses that have not come: micro-batch · replicas + replica
        self.failure: list[BaseException] = []
        judges = [loop for loop in loops if loop.worker.count - 1 in loop.worker.stages]
        self.replicas = max(1, len(judges))
        for n, loop in enumerate(judges):
            loop.worker.report = deliver(self.awaited, n, self.replicas)
        for loop, commands in zip(loops, self.commands, strict=True):
            # replicas whose operations came in other orders would wait for each other's sums, or parts of weights
            alone = loop.worker.replicas is None and loop.worker.residence.alone
            loop.more = partial(_waits, commands) if alone else _never
        self.threads = [
            threading.Thread(
                target=_serve, args=(loop, commands, closed, self.failure, self.awaited), daemon=True, name="pipeback"
            )
            for loop, commands in zip(loops, self.commands, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def tell(self, command: Command) -> None:
        """Send every worker a command, to run after all earlier ones; waits while too many have not been done.

        It runs under the caller's autocast, which is a setting of each thread.
        """
        around = accelerators.casting()
        command = partial(_under, around, command) if around else command
        for commands in self.commands:
            self.raise_failure()
            while not commands.offer(command, 0.2):
                self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure:
            raise self.failure[0]
        self.check()

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        each = len(batches) // self.replicas  # replica r has the r-th share
        mbs = range(first, first + each)
        losses = Awaited(i * self.replicas + replica for replica in range(self.replicas) for i in mbs)
        self.awaited.update(dict.fromkeys(losses.keys, losses))
        self.tell(lambda loop: loop.push(batches[loop.replica * each : (loop.replica + 1) * each], options))
        return lambda sizes: LazyLoss(lambda: mean(losses.values(), sizes), lambda: losses.known)

    # where the loss is computed outside, each part is done when it returns, for the caller may then read gradients and
    # weights; the workers run backwards and updates of different micro-batches at once

    def forward(self, mb: int, xs: Sequence[Value], options: Options, expected: int) -> list[Value]:
        outputs = Awaited(range(mb, mb + len(xs)))
        self.awaited.update(dict.fromkeys(outputs.keys, outputs))
        self._do(lambda loop: loop.forward(xs, options, expected))
        return outputs.values()

    def backward(self, gradients: Sequence[Value]) -> None:
        self._do(lambda loop: loop.backward(gradients))

    def forget(self, which: Collection[int], of: int) -> None:
        self._do(lambda loop: loop.forget(which, of))

    def step(self, flush: bool) -> None:
        self._do(Loop.drain if flush else Loop.settle)

    def _do(self, command: Command) -> None:
        self.tell(command)
        self.join()

    def wait(self) -> None:
        self._do(Loop.rest)

    def drain(self) -> None:
        self.tell(Loop.drain)
        self.wait()

    def join(self) -> None:
        """Wait until all commands are done."""
        for commands in self.commands:
            commands.join()
        self.raise_failure()

    def close(self) -> None:
        """Stop the threads and wait for their end; reading a loss that was never computed then raises an error."""
        self.closed.set()
        for commands, thread in zip(self.commands, self.threads, strict=True):
            while thread.is_alive() and thread is not threading.current_thread():
                commands.put(None)
                thread.join(timeout=0.05)
        for loop in self.loops:
            loop.worker.residence.close()
        fail(self.awaited, RuntimeError("the pipeline was closed before this loss was computed"))


def _waits(commands: Commands) -> bool:
    """Whether a command waits that may be begun now; how fast they come must not change bits where torch is told so."""
    return not (commands.empty() or torch.are_deterministic_algorithms_enabled())


def _never() -> bool:
    return False


def _under(around: accelerators.Autocast, command: Command, loop: Loop) -> None:
    with accelerators.under(around):
        command(loop)


def deliver(awaited: dict[int, Awaited], replica: int = 0, replicas: int = 1) -> Callable[[int, Tensor], None]:
    def arrived(mb: int, loss: Tensor) -> None:
        key = mb * replicas + replica
        push = awaited.pop(key, None)
        if push is not None:  # None: the pipeline has failed meanwhile
            push.put(key, loss)

    return arrived


def fail(awaited: dict[int, Awaited], error: BaseException) -> None:
    """Raise the error in all that wait for one of these losses, or read it later."""
    for key in list(awaited):
        push = awaited.pop(key, None)
        if push is not None:
            push.fail(error)


def _serve(
    loop: Loop,
    commands: Commands,
    closed: threading.Event,
    failure: list[BaseException],
    awaited: dict[int, Awaited],
) -> None:
    """Run a worker thread, which does commands until it is stopped; the first error of a worker stops all workers."""
    while True:
        command = commands.take()
        try:
            if command is None:
                return
            if not closed.is_set():
                command(loop)
        except Closed:
            pass
        except BaseException as error:
            failure.append(error)
            closed.set()
        finally:
            if failure:
                fail(awaited, failure[0])
            commands.task_done()


def mean(losses: Sequence[Tensor], sizes: list[int] | None) -> Tensor:
    """Return the mean loss of a push, weighted by `sizes` (samples per micro-batch) if they are given."""
    if len(losses) == 1:
        return losses[0].clone()  # a backward that waits may have kept it, as that of a square root does
    stacked = torch.stack(list(losses))
    if sizes is None:
        return stacked.mean()
    weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights).sum() / weights.sum()
