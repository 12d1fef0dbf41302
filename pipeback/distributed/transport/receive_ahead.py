"""Receive ahead: messages of a wire are received by a thread as soon as they come, so that its sender need not wait.

Two workers that hold several parts of the stages send to each other for all of them. If each waited until the other has
received, which it does only when it needs a message, both could wait for ever.
"""

from __future__ import annotations

import queue
import threading

from pipeback.distributed.transport.interruptible_wait import SLICE, Pulse
from pipeback.runtime.link import Name, Wire
from pipeback.tensors.layout import Message


class ReceiveAhead:
    """The receiver's end of a wire. pulse: called while `recv` waits; its error ends the wait."""

    def __init__(self, wire: Wire, pulse: Pulse) -> None:
        self._wire, self._pulse = wire, pulse
        self._came: queue.SimpleQueue[tuple[Name, Message, int] | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True, name="pipeback messages").start()

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        self._wire.send(name, message, mark)

    def recv(self) -> tuple[Name, Message, int]:
        seconds = 0.0  # mostly there is something at once
        while True:
            try:
                found = self._came.get(timeout=seconds)
            except queue.Empty:
                self._pulse()
                seconds = SLICE
                continue
            if isinstance(found, BaseException):
                self._came.put(found)  # it holds for later calls, too
                raise found
            return found

    def close(self) -> None:
        self._wire.close()

    def _receive(self) -> None:
        try:
            while True:
                self._came.put(self._wire.recv())
        except BaseException as error:
            self._came.put(error)
