"""Link: the exchange of tensors between stages. Messages are named (kind, stage, micro-batch) by the receiving stage.

kind "F" carries the activation into a stage, "B" the gradient of its output, "Y" the target into the last stage and
"E" an activation of an evaluation.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from typing import Any, Protocol

from pipeback.tensors.layout import Message

Name = tuple[str, int, int]


class StageLink(Protocol):
    def enter(self, mb: int, x: Message, target: Message, start: int = 0, options: Any = None) -> None:
        """Tell this worker that a micro-batch enters the pipeline."""
        ...

    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None: ...

    def recv(self, kind: str, stage: int, mb: int) -> Message: ...

    def wait(self, kind: str, stage: int, mb: int) -> None:
        """Wait until the message is here, without receiving it."""
        ...

    @property
    def box(self) -> dict[Name, Message]:
        """The messages that have arrived and were not received, by name."""
        ...


class LocalLink:
    """The link of a single worker, which is sender and receiver: a dictionary."""

    def __init__(self) -> None:
        self.box: dict[Name, Message] = {}

    def enter(self, mb: int, x: Message, target: Message, start: int = 0, options: Any = None) -> None:
        pass

    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None:
        self.box[kind, stage, mb] = tensor

    def recv(self, kind: str, stage: int, mb: int) -> Message:
        return self.box.pop((kind, stage, mb))

    def wait(self, kind: str, stage: int, mb: int) -> None:
        pass


class Wire(Protocol):
    """One direction between two workers: messages arrive in the order in which they were sent."""

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        """Send a message; return as soon as it may be changed. Waits only while too many are not received."""
        ...

    def recv(self) -> tuple[Name, Message, int]:
        """Wait for the next message and return its name, the message and its mark."""
        ...

    def close(self) -> None: ...


# a mark has bits for the data, for when the pipeline was last empty, and for the optimizers' options
_START, _OPTIONS, _OTHERS, _RATES = 28, 36, 15, (1 << 15) - 1


class OtherBatch(RuntimeError):
    """A neighbour's micro-batch differs from the one that this worker was given."""


class WireLink:
    """The link of one worker of several: its own stages through a dictionary, its neighbours' through wires.

    owner: the worker of each stage. out, into: the wires to and from the neighbouring workers. watched: takes the
    worker that this one waits for and the name of the message, and returns the context for the wait. mark: computes
    the mark of a micro-batch, by which workers that load their data themselves notice when it differs.
    """

    def __init__(
        self,
        worker: int,
        owner: list[int],
        out: Mapping[int, Wire],
        into: Mapping[int, Wire],
        *,
        watched: Callable[[int, Name], AbstractContextManager[Any]] = lambda worker, name: nullcontext(),
        mark: Callable[[int, Message, Message], int] | None = None,
    ) -> None:
        self.box: dict[Name, Message] = {}
        self.worker, self.owner, self.out, self.into, self.watched, self.mark = worker, owner, out, into, watched, mark
        self.marks: dict[int, int] = {}  # of the micro-batches whose last forward is still to come here
        self.asked: dict[int, int] = {}  # the marks of values that are passed through the stages, by their numbers
        self._told: dict[Name, int] = {}  # the marks of activations that were not received yet
        self.bounds: Callable[[], tuple[float | None, ...]] = tuple  # of the gradients, as `clip` has set them last
        self._bounds: tuple[tuple[float | None, ...], int] = (), 0  # those of the last micro-batch, and their hash
        self.last = max(s for s, w in enumerate(owner) if w == worker)
        self.blocked: Callable[[], None] = lambda: None  # called when this worker has to wait for another

    def enter(self, mb: int, x: Message, target: Message, start: int = 0, options: Any = None) -> None:
        if self.mark is not None:
            data = self.mark(mb, x, target) & ((1 << _START) - 1)
            told = 0 if options is None else options.mark ^ self._bounded() << _OTHERS
            self.marks[mb] = data | (start % 251) << _START | told << _OPTIONS

    def _bounded(self) -> int:
        """A hash of the bounds, with as many bits as that of options other than rates."""
        bounds = self.bounds()
        if bounds != self._bounds[0]:
            told = [None if bound is None else float(bound) for bound in bounds]
            self._bounds = bounds, zlib.crc32(repr(told).encode()) % 4093
        return self._bounds[1]

    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None:
        receiver = self.owner[stage]
        if receiver == self.worker:
            self.box[kind, stage, mb] = tensor
        else:
            mark = self.asked.get(mb, 0) if kind == "E" else 0
            if kind == "F":
                mark = self.marks.pop(mb, 0) if stage == self.last + 1 else self.marks.get(mb, 0)
            # a neighbour that has finished needs no more; if it finished too early, the worker that waits for it fails
            with self.watched(receiver, (kind, stage, mb)), suppress(ConnectionError):
                self.out[receiver].send((kind, stage, mb), tensor, mark)

    def recv(self, kind: str, stage: int, mb: int) -> Message:
        self.wait(kind, stage, mb)
        return self.box.pop((kind, stage, mb))

    def wait(self, kind: str, stage: int, mb: int) -> None:
        name = (kind, stage, mb)
        if name not in self.box:
            worker = self.owner[stage + 1 if kind == "B" else stage - 1]
            with self.watched(worker, name):
                while name not in self.box:
                    key, tensor, mark = self.into[worker].recv()
                    self.box[key] = tensor
                    if key[0] in ("E", "F") and self.mark is not None:
                        self._told[key] = mark
                        if key[0] != kind != "B":
                            self._check_order(name, key, worker)
        if name in self._told:  # not before: a worker may be told of micro-batches that it was not given yet
            sender = self.owner[stage - 1]
            if kind == "E":
                self._compare_asked(self.asked.get(mb, 0) ^ self._told.pop(name), sender)
                return
            self.compare(mb, self._mark(stage, mb) ^ self._told.pop(name), f"worker {sender}")

    def _check_order(self, awaited: Name, came: Name, sender: int) -> None:
        """Raise `OtherBatch` if only one of two workers evaluates, or passes a new form of micro-batch through the
        stages: both send what they were given before they begin, so that nothing else comes in between.
        """
        evaluates = came[0] == "E"
        mb = awaited[2] if evaluates else came[2]
        if not evaluates and mb in self.marks:
            return  # it was in flight before
        if self._told[came] if evaluates else awaited[2] in self.asked:
            one, other = (sender, self.worker) if evaluates else (self.worker, sender)
            raise OtherBatch(
                f"worker {one} evaluates when worker {other} is at micro-batch {mb}; every rank must make the same "
                "calls in the same order"
            )
        raise OtherBatch(
            f"micro-batch {mb} is of a new form, or in another mode, for one of worker {self.worker} and worker "
            f"{sender}, and not for the other; every rank must push the same data (shapes and types) under the same "
            "autocast, and set modules to train or to evaluate alike"
        )

    def _compare_asked(self, differs: int, sender: int) -> None:
        if differs:
            raise OtherBatch(
                f"worker {sender} evaluates other data than worker {self.worker}; every rank must call evaluate with "
                "the same data, in the same order"
            )

    def compare(self, mb: int, differs: int, other: str) -> None:
        """Raise `OtherBatch` if the mark of a micro-batch differs from that of another rank."""
        if not differs:
            return
        if differs % (1 << _START):
            raise OtherBatch(
                f"micro-batch {mb} is not the one that {other} was given; every rank must push the same data, "
                "in the same order"
            )
        both = f"worker {self.worker} and {other}"
        if differs % (1 << _OPTIONS):
            raise OtherBatch(
                f"the pipeline was drained before micro-batch {mb} by one of {both}, and not by the other; every "
                "rank must call drain() at the same micro-batch"
            )
        pushed = f"micro-batch {mb} was pushed when the optimizers of {both} had different"
        if differs >> _OPTIONS & _RATES:
            raise OtherBatch(
                f"{pushed} rates (lr); set them in pipe.optimizers, or step schedulers, alike on every rank"
            )
        raise OtherBatch(
            f"{pushed} options, such as momentum or weight_decay, or clip() had other bounds; set them in "
            "pipe.optimizers, and call clip(), alike on every rank"
        )

    def _mark(self, stage: int, mb: int) -> int:
        """Return the mark to send on with the activation; the worker of the last stage drops it with its last one."""
        ends = self.last == len(self.owner) - 1 and self.owner[stage:] == [self.worker] * len(self.owner[stage:])
        return self.marks.pop(mb, 0) if ends else self.marks.get(mb, 0)


class Closed(Exception):
    """The pipeline was closed while a worker waited."""


class ThreadWire:
    """A bounded queue between two threads of one process; tensors are handed over, not copied.

    bound: how many messages it holds before its sender waits; 0: any number. It must be at least as many as the
    schedule lets the sender run ahead, or sender and receiver would wait for each other. closed: once it is set,
    waiting raises `Closed`.
    """

    def __init__(self, bound: int, closed: threading.Event) -> None:
        self.queue: queue.Queue[tuple[Name, Message, int]] = queue.Queue(bound)
        self.closed = closed

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        while not self.closed.is_set():
            try:
                return self.queue.put((name, message, mark), timeout=0.2)
            except queue.Full:
                continue
        raise Closed

    def recv(self) -> tuple[Name, Message, int]:
        while not self.closed.is_set():
            try:
                return self.queue.get(timeout=0.2)
            except queue.Empty:
                continue
        raise Closed

    def close(self) -> None:
        self.closed.set()


def links(owner: list[int], wire: Callable[[], Wire]) -> list[WireLink]:
    """Return a link for every worker of one process; a wire in each direction joins neighbours."""
    pairs = {(a, b) for a, b in pairwise(owner) if a != b}
    wires = {pair: wire() for a, b in pairs for pair in ((a, b), (b, a))}
    return [
        WireLink(
            worker,
            owner,
            {b: w for (a, b), w in wires.items() if a == worker},
            {a: w for (a, b), w in wires.items() if b == worker},
        )
        for worker in range(max(owner) + 1)
    ]
