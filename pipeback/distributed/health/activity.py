"""Activity: what this rank is doing. Its threads record it at next to no cost, and its beats report it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pipeback.distributed.health.heartbeat import Heartbeat


class Wait(NamedTuple):
    on: list[int]
    what: str
    since: float
    thread: int


class Activity:
    """Records what this rank is doing. A pipeline has a loop thread and the caller's thread, which both record it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        now = time.monotonic()
        self._work: tuple[Any, float, int] = (None, now, 0)  # operation, since, thread
        self._call: tuple[str | None, float] = (None, now)
        self._waits: dict[int, Wait] = {}

    def working(self, what: Any) -> None:
        """Note that the loop thread begins an operation: (kind, stage, micro-batch) or words; this is cheap."""
        self._work = (what, time.monotonic(), threading.get_ident())

    def idle(self) -> None:
        """Note that the loop thread has nothing to do."""
        self._work = (None, time.monotonic(), threading.get_ident())

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A context in which the caller's thread is in a public call, such as "push()", rather than in its own code."""
        outer = self._call[0]
        self._call = (outer or what, time.monotonic())
        try:
            yield
        finally:
            self._call = (outer, time.monotonic())

    @contextmanager
    def waiting(self, on: int | Sequence[int], what: str, seconds: float = 0.0) -> Iterator[None]:
        """A context in which this thread waits for the ranks `on`, already for `seconds`.

        what: what it waits for, such as "micro-batch 17 at stage 3" or "state_dict()". It is only for waits without
        which the rank cannot go on, and not for a thread that always listens. A waiting thread calls `check` now and
        then; the lookout (see `health`) judges how long the wait may last.
        """
        on = [r for r in ([on] if isinstance(on, int) else on) if r != self.rank]
        wait = Wait(on, what, time.monotonic() - seconds, threading.get_ident())
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]
            work, _, thread = self._work
            if thread == wait.thread:
                self._work = (work, time.monotonic(), thread)  # the operation continues, without the time of the wait

    def waits(self) -> list[Wait]:
        return [wait for wait in list(self._waits.values()) if wait.on]

    def status(self) -> Heartbeat:
        """Return the content of a beat, except for the fields that `Health` adds."""
        now, (work, since, thread), (call, called) = time.monotonic(), self._work, self._call
        waits = self.waits()
        if work is not None and all(wait.thread != thread for wait in waits):
            # the loop runs, whatever other threads wait for
            return Heartbeat(doing=f"in {_words(work)}", seconds=now - since)
        told = [(wait.on, wait.what, now - wait.since) for wait in waits]
        return Heartbeat(doing=f"in {call or 'its own code'}", seconds=now - max(since, called), waits=told)


def _words(what: Any) -> str:
    """Return an operation in words. what: (kind, stage, micro-batch), or words already."""
    if isinstance(what, str):
        return what
    kind, stage, mb = what
    names = {"F": "forward", "B": "backward", "U": "update"}
    names |= {"I": "gradient of the input", "W": "gradient of the weights"}
    return f"the {names.get(kind, kind)} of {'stage' if isinstance(stage, int) else 'stages'} {stage}, micro-batch {mb}"
