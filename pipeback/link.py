"""How stages exchange tensors. Messages are named (kind, stage, micro-batch), `stage` being the receiver.

kind "F" carries the activation into a stage, "B" the gradient of its output, "Y" the target into the last stage.
"""

from __future__ import annotations

import queue
import threading
from itertools import pairwise
from typing import Any, Protocol

Message = Any  # a tensor, or a tuple of tensors and Nones


class Link(Protocol):
    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None: ...

    def recv(self, kind: str, stage: int, mb: int) -> Message: ...

    def wait(self, kind: str, stage: int, mb: int) -> None:
        """Return when `recv` would."""
        ...

    def waiting(self) -> dict[tuple[str, int, int], Message]:
        """Messages sent but not received, by name; the pipeline must be quiet."""
        ...


class LocalLink:
    """Sender and receiver are one worker: a dictionary."""

    def __init__(self) -> None:
        self._box: dict[tuple[str, int, int], Message] = {}

    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None:
        self._box[kind, stage, mb] = tensor

    def recv(self, kind: str, stage: int, mb: int) -> Message:
        return self._box.pop((kind, stage, mb))

    def wait(self, kind: str, stage: int, mb: int) -> None:
        pass

    def waiting(self) -> dict[tuple[str, int, int], Message]:
        return self._box


class Closed(Exception):
    """The pipeline was closed while a worker waited."""


class Channels:
    """Bounded queues between the workers of one process, one queue a direction; tensors are handed over, not copied.

    owner: the worker of each stage. bound: messages a queue holds before its sender waits; it must cover what the
    schedule lets run ahead, or a sender would wait for a receiver that waits for it.
    """

    def __init__(self, owner: list[int], bound: int) -> None:
        self.owner = owner
        self.closed = threading.Event()
        pairs = {(a, b) for a, b in pairwise(owner) if a != b}
        self.queues: dict[tuple[int, int], queue.Queue[Any]] = {
            pair: queue.Queue(bound) for a, b in pairs for pair in ((a, b), (b, a))
        }

    def put(self, pair: tuple[int, int], item: Any) -> None:
        while not self.closed.is_set():
            try:
                return self.queues[pair].put(item, timeout=0.2)
            except queue.Full:
                continue
        raise Closed

    def get(self, pair: tuple[int, int]) -> Any:
        while not self.closed.is_set():
            try:
                return self.queues[pair].get(timeout=0.2)
            except queue.Empty:
                continue
        raise Closed


class ThreadLink(LocalLink):
    """The link of one worker thread: its own stages through a dictionary, the others through `Channels`."""

    def __init__(self, worker: int, channels: Channels) -> None:
        super().__init__()
        self.worker, self.channels = worker, channels

    def send(self, kind: str, stage: int, mb: int, tensor: Message) -> None:
        receiver = self.channels.owner[stage]
        if receiver == self.worker:
            self._box[kind, stage, mb] = tensor
        else:
            self.channels.put((self.worker, receiver), ((kind, stage, mb), tensor))

    def recv(self, kind: str, stage: int, mb: int) -> Message:
        self.wait(kind, stage, mb)
        return self._box.pop((kind, stage, mb))

    def wait(self, kind: str, stage: int, mb: int) -> None:
        name = (kind, stage, mb)
        if name not in self._box:
            neighbour = stage - 1 if kind == "F" else stage + 1
            pair = (self.channels.owner[neighbour], self.worker)
            while name not in self._box:
                key, tensor = self.channels.get(pair)
                self._box[key] = tensor

    def waiting(self) -> dict[tuple[str, int, int], Message]:
        for (_, receiver), box in self.channels.queues.items():
            while receiver == self.worker and not box.empty():
                key, tensor = box.get()
                self._box[key] = tensor
        return self._box
