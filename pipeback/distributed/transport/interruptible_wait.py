"""Interruptible wait: waits for another process that end by a pulse, by close(), or when that process ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Pulse = Callable[[], None]  # called at least every 0.2 s while a wire waits; an error that it raises ends the wait
SLICE = 0.2  # seconds between two pulses
T = TypeVar("T")


class Broken(ConnectionError):
    """A wire is broken: rank `peer` at the other end has ended or closed it, or this end has."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(peer, what)
        self.peer = peer

    def __str__(self) -> str:
        return f"the connection to rank {self.peer} is broken: {self.args[1]}"


def unbroken(peer: int, call: Callable[[], T]) -> T:
    """Return the result of a call of torch.distributed; its RuntimeError for a lost peer becomes `Broken`."""
    try:
        return call()
    except RuntimeError as error:
        raise Broken(peer, str(error).strip().partition("\n")[0]) from error


class InterruptibleWait:
    """Waits for works of gloo, of which torch can neither interrupt the wait nor say whether it would be short.

    So a second thread calls the pulse. When it raises, a receive with a tiny time limit is begun. When that has passed,
    gloo closes the connections of its group, which ends the wait. The group cannot be used afterwards.
    """

    def __init__(self, group: Any, peer: int, pulse: Pulse) -> None:
        self.group, self.peer, self.pulse = group, peer, pulse
        self.waiting = False
        self.error: BaseException | None = None  # the error that has ended the wait
        self.end = threading.Event()
        self.thread: threading.Thread | None = None

    def wait(self, work: Any) -> None:
        if self.end.is_set():
            raise self.error or Broken(self.peer, "closed at this end")
        self.pulse()
        if self.thread is None:
            watch = threading.Thread(target=_watch, args=(weakref.ref(self), self.end), daemon=True)
            self.thread = watch
            watch.start()
        self.waiting = True
        try:
            unbroken(self.peer, work.wait)
        except Broken as error:
            raise self.error or error from error.__cause__
        finally:
            self.waiting = False

    def look(self) -> None:
        if not self.waiting or self.error is not None:
            return
        try:
            if self.end.is_set():
                raise Broken(self.peer, "closed at this end")
            self.pulse()
        except BaseException as error:
            self.error = error
            self.sever()

    def close(self) -> None:
        self.end.set()

    def sever(self) -> None:
        """End all works of the group, those that nobody waits for, too."""
        self.end.set()
        with suppress(RuntimeError, ValueError):  # ValueError: the group was destroyed
            nothing: Any = dist.irecv(torch.empty(1, device="cpu"), self.peer, group=self.group)
            nothing.wait(timedelta(milliseconds=1))


def _watch(vigil: weakref.ref[InterruptibleWait], end: threading.Event) -> None:
    """Call the pulse until the wait object is gone, so that a wire that nobody closed leaves no thread behind."""
    while True:
        ended = end.wait(SLICE)
        if (here := vigil()) is not None:
            here.look()
        if ended or here is None:
            return
        del here
