"""Runtimes: where the loops of a pipeline run. The event loop in the caller's thread, or one thread a worker.

A runtime is told what was pushed and gives losses back; what a loop does is the same in all of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeback.joint import Options
from pipeback.lazy import LazyLoss
from pipeback.ledger import Record
from pipeback.link import Channels, Closed
from pipeback.method import Method
from pipeback.order import Order, Wave
from pipeback.stage import Value
from pipeback.worker import Worker

Batch = tuple[Value, Any, int]  # inputs, target, samples
Messages = dict[tuple[str, int, int], Any]  # by (kind, stage, micro-batch)
Read = Callable[[list[int] | None], Tensor]  # sizes, if they weigh, -> the mean loss of a push


class Loop:
    """One worker's loop: an order, the same on every worker, and the worker that does its own part."""

    def __init__(self, worker: Worker, order: Order, method: Method) -> None:
        self.worker, self.order, self.method = worker, order, method
        self.fresh = True  # the next micro-batch begins the schedule anew
        self.ahead = False  # a micro-batch has gone forward that the order does not know yet
        self._waves: Iterator[Wave] = iter(())  # what may still be done, from the updates that are due on

    def push(self, batches: Sequence[Batch], options: Options) -> None:
        """Let micro-batches in one by one, and do all that may then be done."""
        order, worker, link = self.order, self.worker, self.worker.link
        if self.fresh:
            self._begin(len(batches))
        last = worker.count - 1
        for x, target, size in batches:
            i = order.arrived
            worker.options[i] = options
            if worker.samples:
                worker.sizes[i] = size
            if 0 in worker.stages:
                link.send("F", 0, i, x)
            if last in worker.stages:
                link.send("Y", last, i, target)
            worker.run(order.advance(i + 1))
        if self.method.flush_each_push:
            self.drain()

    def drain(self) -> None:
        """Finish what is in flight; the schedule begins anew with the next micro-batch."""
        self.settle()
        if not self.fresh:
            self.worker.run(self.order.close(self.order.arrived))
            self.fresh = True

    # -- a micro-batch in three parts, for a loss that is computed outside -----------------------------------------

    def forward(self, x: Value, options: Options, expected: int) -> None:
        """F of the next micro-batch at every stage.

        The order hears of it with the backward, so that it may be forgotten. Nothing can come before these forwards:
        all that was allowed before has been done, and a stage downstream waits for them.
        """
        self.settle()
        if self.fresh:
            self._begin(expected)
        worker, i = self.worker, self.order.arrived
        worker.options[i] = options
        worker.link.send("F", 0, i, x)
        worker.run([Wave("F", [(s, i) for s in range(worker.count)])])
        self.ahead = True

    def forget(self) -> None:
        """The micro-batch that has just gone forward gets no backward."""
        for stage in self.worker.stages.values():
            stage.flights.pop(self.order.arrived, None)
        self.ahead = False

    def backward(self, gradient: Value) -> None:
        """The backwards that may be done now; the updates that follow are left to `settle`."""
        worker, i = self.worker, self.order.arrived
        worker.link.send("B", worker.count - 1, i, gradient)
        self.ahead = False
        waves = self.order.advance(i + 1)
        kind, ops = next(waves)
        if kind != "F" or len(ops) != worker.count:
            raise RuntimeError(f"the schedule holds micro-batch {i} back; a forward must not wait for later arrivals")
        for wave in waves:
            if wave.kind == "U":
                self._waves = chain([wave], waves)
                break
            worker.run([wave])

    def settle(self) -> None:
        """Do all that may be done."""
        waves, self._waves = self._waves, iter(())
        self.worker.run(waves)

    def _begin(self, pushed: int) -> None:
        order, worker = self.order, self.worker
        order.restart(self.method.schedule_at(order.arrived, pushed))
        worker.start, worker.base = order.arrived, next(iter(worker.stages.values())).version
        worker.entered = worker.base
        self.fresh = False


class Runtime(Protocol):
    """What a pipeline asks of the place where it runs."""

    owner: list[int]  # the worker of each stage

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read: ...
    def wait(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def ledger(self) -> Sequence[Record]: ...
    def record(self, on: bool) -> None: ...
    def recorded(self) -> list[tuple[float, float, int, str, int]]: ...
    def waiting(self) -> Messages: ...
    def progress(self, number: Callable[[Any], int]) -> dict[str, Any]: ...
    def resume(self, saved: dict[str, Any], messages: Messages, options: list[Options]) -> None: ...


class Inline:
    """The event loop: everything in the caller's thread."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.owner = [0] * loop.worker.count
        self.losses: dict[int, Any] = {}  # where the loss is computed outside: outputs
        loop.worker.report = self.losses.__setitem__

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        self.loop.push(batches, options)
        wanted = range(first, first + len(batches))
        missing = [i for i in wanted if i not in self.losses]
        if missing:
            raise RuntimeError(
                f"the schedule holds micro-batch {missing[0]} back; a forward must not wait for later arrivals"
            )
        losses = [self.losses.pop(i) for i in wanted]
        return lambda sizes: _mean(losses, sizes)

    def forward(self, x: Value, options: Options, expected: int) -> Value:
        self.loop.forward(x, options, expected)
        return self.losses.pop(self.loop.order.arrived)

    def wait(self) -> None:
        self.loop.settle()

    def drain(self) -> None:
        self.loop.drain()

    def close(self) -> None:
        pass

    def ledger(self) -> Sequence[Record]:
        return self.loop.worker.ledger

    def record(self, on: bool) -> None:
        _trace(self.loop.worker, on)

    def recorded(self) -> list[Any]:
        return list(self.loop.worker.trace)

    def waiting(self) -> Messages:
        return self.loop.worker.link.waiting()

    def progress(self, number: Callable[[Any], int]) -> dict[str, Any]:
        return _progress(self.loop, [self.loop], number)

    def resume(self, saved: dict[str, Any], messages: Messages, options: list[Options]) -> None:
        _resume(self.loop, saved, messages, options)


class Threads:
    """One thread a worker, each with its own loop; commands go through bounded queues."""

    def __init__(self, loops: list[Loop], channels: Channels, depth: int = 8) -> None:
        self.loops, self.channels, self.owner = loops, channels, channels.owner
        self.commands: list[queue.Queue[Any]] = [queue.Queue(depth) for _ in loops]
        self.futures: dict[int, Future[Tensor]] = {}
        self.failure: list[BaseException] = []
        loops[-1].worker.report = _deliver(self.futures)
        self.threads = [
            threading.Thread(
                target=_serve, args=(loop, commands, channels, self.failure, self.futures), daemon=True, name="pipeback"
            )
            for loop, commands in zip(loops, self.commands, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _say(self, command: Any) -> None:
        for commands in self.commands:
            while True:
                self._raise()
                try:
                    commands.put(command, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def _raise(self) -> None:
        if self.failure:
            raise self.failure[0]

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        futures: list[Future[Tensor]] = [Future() for _ in batches]
        self.futures.update(zip(range(first, first + len(batches)), futures, strict=True))
        self._say(("push", batches, options))
        return lambda sizes: LazyLoss(lambda: _mean([future.result() for future in futures], sizes))

    def wait(self) -> None:
        for commands in self.commands:
            commands.join()
        self._raise()

    def drain(self) -> None:
        self._say(("drain",))
        self.wait()

    def close(self) -> None:
        """Stop the threads and wait until they have; losses that will never come say so when read."""
        self.channels.closed.set()
        for commands, thread in zip(self.commands, self.threads, strict=True):
            while thread.is_alive() and thread is not threading.current_thread():
                with suppress(queue.Full):
                    commands.put_nowait(None)
                thread.join(timeout=0.05)
        for mb in list(self.futures):
            future = self.futures.pop(mb, None)
            if future is not None and not future.done():
                future.set_exception(RuntimeError("the pipeline was closed before this loss was there"))

    def ledger(self) -> Sequence[Record]:
        return [record for loop in self.loops for record in loop.worker.ledger]

    def record(self, on: bool) -> None:
        for loop in self.loops:
            _trace(loop.worker, on)

    def recorded(self) -> list[Any]:
        return sorted(slot for loop in self.loops for slot in loop.worker.trace)

    def waiting(self) -> Messages:
        return {name: m for loop in self.loops for name, m in loop.worker.link.waiting().items()}

    def progress(self, number: Callable[[Any], int]) -> dict[str, Any]:
        return _progress(self.loops[0], self.loops, number)

    def resume(self, saved: dict[str, Any], messages: Messages, options: list[Options]) -> None:
        for loop in self.loops:
            _resume(loop, saved, messages, options)


def _deliver(futures: dict[int, Future[Tensor]]) -> Callable[[int, Tensor], None]:
    return lambda mb, loss: futures.pop(mb).set_result(loss)


def _serve(
    loop: Loop,
    commands: queue.Queue[Any],
    channels: Channels,
    failure: list[BaseException],
    futures: dict[int, Future[Tensor]],
) -> None:
    """A worker thread: obey until told to stop; the first error of any worker closes all."""
    while True:
        command = commands.get()
        try:
            if command is None:
                return
            if not channels.closed.is_set():
                if command[0] == "push":
                    loop.push(*command[1:])
                else:
                    loop.drain()
        except Closed:
            pass
        except BaseException as error:
            failure.append(error)
            channels.closed.set()
        finally:
            if failure:
                for mb in list(futures):
                    future = futures.pop(mb, None)
                    if future is not None and not future.done():
                        future.set_exception(failure[0])
            commands.task_done()


def _trace(worker: Worker, on: bool) -> None:
    if on:
        worker.trace = []
    worker.tracing = on


def _mean(losses: Sequence[Tensor], sizes: list[int] | None) -> Tensor:
    """The mean loss of a push; with sizes, weighted by samples."""
    if len(losses) == 1:
        return losses[0]
    stacked = torch.stack(list(losses))
    if sizes is None:
        return stacked.mean()
    weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights).sum() / weights.sum()


def _progress(loop: Loop, loops: Sequence[Loop], number: Callable[[Any], int]) -> dict[str, Any]:
    """Where a loop is: the same on every worker but for what only some still remember."""
    worker = loop.worker
    return {
        "order": loop.order.state(),
        "fresh": loop.fresh,
        "start": worker.start,
        "base": worker.base,
        "entered": worker.entered,
        "entries": {str(i): v for each in loops for i, v in each.worker.entries.items()},
        "options": {str(i): number(o) for each in loops for i, o in each.worker.options.items()},
        "sizes": {str(i): n for each in loops for i, n in each.worker.sizes.items()},
    }


def _resume(loop: Loop, saved: dict[str, Any], messages: Messages, options: list[Options]) -> None:
    worker = loop.worker
    start, state = saved["order"]["start"], saved["order"]
    loop.order.resume(loop.method.schedule_at(start, 1), state)
    loop.fresh, worker.start, worker.base, worker.entered = (
        saved["fresh"],
        saved["start"],
        saved["base"],
        saved["entered"],
    )
    worker.entries = {int(i): v for i, v in saved["entries"].items()}
    worker.options = {int(i): options[n] for i, n in saved["options"].items()}
    worker.sizes = {int(i): n for i, n in saved["sizes"].items()}
    worker.link.waiting().update({name: m for name, m in messages.items() if name[1] in worker.stages})
