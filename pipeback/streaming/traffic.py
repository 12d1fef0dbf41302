"""Traffic: the bytes that streaming has moved, and how long computing waited for it; a `Meter` counts this."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from pipeback.byte_sizes import written as as_bytes
from pipeback.notebook import seconds as in_seconds
from pipeback.notebook import table

OF_WHAT = {
    "weights_in": "weights copied to the device",
    "gradients_out": "gradients and partial sums that left the device",
    "sums_in": "partial sums that came back",
    "gathered": "weights from the stores of other ranks",
    "scattered": "gradients to other ranks",
    "fetches": "how often the weights of a stage were brought",
    "stall": "computing waited for weights, gradients or the store",
    "seconds": "operations ran, with their waits",
    "peak_stages": "the most on the device at once, of one worker",
    "peak_bytes": "the most bytes of weights on the device at once",
    "read": "from files",
    "written": "to files",
}


class Traffic(NamedTuple):
    """Bytes, fetches and seconds of streaming."""

    weights_in: int = 0  # bytes of weights copied to the device
    gradients_out: int = 0  # bytes of gradients, and of partial sums, that left the device
    sums_in: int = 0  # bytes of partial sums that came back
    gathered: int = 0  # bytes of weights that came from other ranks' stores
    scattered: int = 0  # bytes of gradients that went to other ranks
    fetches: int = 0  # how often a stage's weights were brought to the device
    stall: float = 0.0  # seconds in which computing waited for weights, gradients or the store
    seconds: float = 0.0  # seconds in which operations ran, with their waits
    peak_stages: int = 0  # the most stages on the device at once, of one worker
    peak_bytes: int = 0  # the most bytes of weights on the device at once
    read: int = 0  # bytes read from files
    written: int = 0  # bytes written to files

    def since(self, before: Traffic) -> Traffic:
        """Return the traffic since `before`; the peaks are those of the whole time."""
        more = {name: getattr(self, name) - getattr(before, name) for name in Traffic._fields if "peak" not in name}
        return self._replace(**more)

    def _repr_html_(self) -> str:
        others: dict[str, Callable[[float], str]] = {
            "fetches": str, "peak_stages": str, "stall": in_seconds, "seconds": in_seconds,
        }  # fmt: skip
        rows = [
            (name.replace("_", " "), others.get(name, as_bytes)(value), OF_WHAT[name])
            for name, value in self._asdict().items()
        ]
        return table("Traffic", ["", "so far", "of what"], rows)


class Meter:
    """Counts the transfers and the waits of the threads of one worker.

    stalled: a context that is entered during a wait, for the health of ranks. moves: (start, end, "fetch" or "store",
    stage).
    """

    def __init__(self, stalled: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        self.traffic = Traffic()
        self.moves: list[tuple[float, float, str, int]] = []
        self._stalled, self._lock, self._recording = stalled, threading.Lock(), False

    def add(self, **more: float) -> None:
        """Add to the counts of these names."""
        with self._lock:
            old = self.traffic
            self.traffic = old._replace(**{name: getattr(old, name) + value for name, value in more.items()})

    def record(self, on: bool) -> None:
        """Record every transfer from now on, or stop."""
        if on:
            self.moves = []
        self._recording = on

    @contextmanager
    def moving(self, kind: str, stage: int) -> Iterator[None]:
        """A context in which a stage's weights are fetched, or updated in the store; its time is recorded."""
        begin = time.perf_counter()
        yield
        if self._recording:
            self.moves.append((begin, time.perf_counter(), kind, stage))

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """A context in which computing waits for weights, gradients or the store; its time is counted."""
        begin = time.perf_counter()
        try:
            with nullcontext() if self._stalled is None else self._stalled("the store"):
                yield
        finally:
            self.add(stall=time.perf_counter() - begin)


def together(parts: Iterable[Traffic]) -> Traffic:
    """Return the traffic of several workers: sums, but the maximum of the peak of stages and of the seconds."""
    some = list(parts) or [Traffic()]
    sums = {name: sum(getattr(part, name) for part in some) for name in Traffic._fields}
    return Traffic(**sums)._replace(
        peak_stages=max(part.peak_stages for part in some), seconds=max(part.seconds for part in some)
    )
