"""Observers: recording and watching, for the loops of a pipeline and for loops that are started later."""

from __future__ import annotations

from collections.abc import Sequence

from pipeback.distributed import clocks
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.runtime.loop import Loop
from pipeback.runtime.staleness import Watch
from pipeback.schedules.recording import Track


class Observers:
    """Records and watches the loops of this process, with the clocks of all ranks."""

    def __init__(self) -> None:
        self._clock = clocks.Reading(0.0)
        self._recording = False
        self._watch: Watch | None = None

    def record(self, loops: Sequence[Loop], ranks: Ranks | SingleProcess, on: bool) -> None:
        """Measure every operation from now on, or stop. Every rank calls it."""
        if on:
            self._clock = clocks.read(ranks)
        self._recording = on
        for loop in loops:
            loop.worker.record(on)

    def tracks(self, loops: Sequence[Loop], ranks: Ranks | SingleProcess, owner: Sequence[int]) -> list[Track]:
        """The operations measured on all ranks. owner: the worker of each stage."""
        return clocks.tracks(ranks, loops, owner, self._clock)

    def watch(self, loops: Sequence[Loop], stages: int, on: bool) -> Watch:
        """Follow micro-batches from now on, or stop; returns the `Watch` that collects them."""
        watch = self._watch or Watch(stages)
        self._watch = watch if on else None
        self._tell(loops)
        return watch

    def started(self, loops: Sequence[Loop]) -> None:
        """Have new loops record and watch as the loops before them did."""
        self._tell(loops)
        for loop in loops:
            loop.worker.record(self._recording)

    def _tell(self, loops: Sequence[Loop]) -> None:
        for loop in loops:
            loop.worker.watch = self._watch
        if self._watch is not None and loops:
            newest = {s: loop.worker.residence.newest for loop in loops for s in loop.worker.stages}
            self._watch.first = min(newest)
            self._watch.newest = lambda stage: newest[stage.index](stage)
