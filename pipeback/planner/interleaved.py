"""Interleaved sweeps: as `sweeps`, for workers that hold several stages each, their chunks.

The n-th forward of worker w is in sweep n + w, its n-th backward in sweep n + w + ahead. So every input comes from the
sweep before, and the operations of all workers are a few passes over lists. The worker behind the last one is the
first, with the next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TypeAlias

from pipeback.planner.routines import Routine
from pipeback.planner.sweeps import StageTimes, State
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.timeline import Slot, Time

Run = tuple[int, int, int]  # a chunk, the first worker that does it, and one behind the last
Came: TypeAlias = "list[Time | None]"  # when the input of each worker came; None: it waits for none


class InterleavedSweeps:
    """slots: keep every operation."""

    def __init__(self, routine: Routine, times: Sequence[StageTimes], slots: bool = False) -> None:
        p = routine.workers
        self.routine, self.period = routine, routine.stages
        self.free: list[Time] = [0] * p
        self.begins: list[Time] = [0] * p
        self.slots: list[Slot] | None = [] if slots else None
        self._updated = [sum(t.update for t in times[w::p]) for w in range(p)]
        # by stage: seconds of F and B, and of the messages that they send
        self._forward, self._forth = [t.forward for t in times], [t.forth for t in times]
        self._backward, self._back = [t.input_gradient + t.weight_gradient for t in times], [t.back for t in times]
        self._came: Came = [None] * p  # for the F of the next sweep
        self._came_back: Came = [None] * p  # for its B

    @property
    def beginnings(self) -> set[int]:
        """The sweeps in which a worker begins its forwards or backwards; they end `rounds` later."""
        return {w + more for w in range(self.routine.workers) for more in (0, self.routine.ahead(w))}

    def sweep(self, t: int) -> list[int]:
        """Do the F and B of sweep t. Returns the workers whose U is due."""
        self._forwards(t)
        return self._backwards(t)

    def _forwards(self, t: int) -> None:
        """Worker w does its forward number t − w."""
        n, p, v = self.routine.rounds, self.routine.workers, self.routine.chunks
        first, last = max(0, t - n + 1), min(p, t + 1)
        came, self._came = self._came, [None] * p
        if first >= last:
            return
        runs: list[Run] = []
        while first < last:
            group = (t - first) // p
            runs.append((group % v, first, min(last, t - group * p + 1)))
            first = runs[-1][2]
        first = runs[0][1]
        starts = begun(self.free[first:last], came[first:last])
        if t < p:
            self.begins[t] = starts[-1]
        ends = list(map(add, starts, self._of(self._forward, runs)))
        self.free[first:last] = ends
        self._keep("F", t, first, starts)
        sent: Came = list(map(add, ends, self._of(self._forth, runs)))
        self._came[first + 1 : last + 1] = sent[: p - 1 - first]
        if last == p and runs[-1][0] < v - 1:
            self._came[0] = sent[-1]

    def _backwards(self, t: int) -> list[int]:
        """Worker w does its backward number t − ahead + w, with `ahead` that of the first."""
        n, p, v = self.routine.rounds, self.routine.workers, self.routine.chunks
        before = self.routine.ahead(0) - t
        first, last = max(0, before), min(p, n + before)
        came, self._came_back = self._came_back, [None] * p
        if first >= last:
            return []
        runs: list[Run] = []
        while first < last:
            group = (first - before) // p
            runs.append((v - 1 - group % v, first, min(last, (group + 1) * p + before)))
            first = runs[-1][2]
        first = runs[0][1]
        starts = begun(self.free[first:last], came[first:last])
        ends = list(map(add, starts, self._of(self._backward, runs)))
        self.free[first:last] = ends
        self._keep("B", t, first, starts)
        sent: Came = list(map(add, ends, self._of(self._back, runs)))
        self._came_back[max(0, first - 1) : last - 1] = sent[first == 0 :]
        if first == 0 and runs[0][0]:
            self._came_back[-1] = sent[0]
        return [last - 1] if self.routine.updates(last - 1 - before) else []

    def _of(self, by_stage: Sequence[Time], runs: Sequence[Run]) -> list[Time]:
        """The numbers of the stages that workers do, one worker after the other."""
        p = self.routine.workers
        found: list[Time] = []
        for chunk, first, last in runs:
            found += by_stage[chunk * p + first : chunk * p + last]
        return found

    def update(self, workers: Sequence[int], t: int) -> None:
        """Do the U of these workers, of all their stages."""
        for w in workers:
            begin = self.free[w]
            self.free[w] += self._updated[w]
            if self.slots is not None:
                self.slots.append(Slot(begin, self.free[w], w, Op("U", self.routine.micro_batches - 1)))

    def state(self) -> State:
        """All times that later sweeps depend on."""
        return [list(self.free), *([one for one in came if one is not None] for came in (self._came, self._came_back))]

    def leap(self, moved: State) -> None:
        """Move these times on, as if sweeps had been done."""
        self.free = list(map(add, self.free, moved[0]))
        for came, by in zip((self._came, self._came_back), moved[1:], strict=True):
            more = iter(by)
            came[:] = [None if one is None else one + next(more) for one in came]

    def busy(self) -> list[Time]:
        """The seconds of the operations of each worker, over the whole routine."""
        m, p = self.routine.micro_batches, self.routine.workers
        each = [m * (f + b) for f, b in zip(self._forward, self._backward, strict=True)]
        return [sum(each[w::p]) + self._updated[w] for w in range(p)]

    def _keep(self, kind: Kind, t: int, first: int, starts: Sequence[Time]) -> None:
        if self.slots is None:
            return
        for w, begin in enumerate(starts, first):
            if kind == "F":
                stage, mb = self.routine.forward(w, t - w)
            else:
                stage, mb = self.routine.backward(w, t - self.routine.ahead(0) + w)
            self.slots.append(Slot(begin, self.free[w], stage, Op(kind, mb)))


def begun(free: Sequence[Time], came: Sequence[Time | None]) -> list[Time]:
    """When operations begin: once their worker is free and their input has come."""
    return [one if other is None or other <= one else other for one, other in zip(free, came, strict=True)]
