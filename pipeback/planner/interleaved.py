"""Interleaved sweeps: as `sweeps`, for workers that hold several stages each, their chunks.

The n-th forward of worker w is in sweep n + w, its n-th backward in sweep n + w + ahead. So every input comes from the
sweep before. The worker behind the last one is the first, with the next chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeback.planner.routines import Routine
from pipeback.planner.sweeps import StageTimes, State
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.timeline import Slot, Time


class InterleavedSweeps:
    """slots: keep every operation."""

    def __init__(self, routine: Routine, times: Sequence[StageTimes], slots: bool = False) -> None:
        p = routine.workers
        self.routine, self.period = routine, routine.stages
        self.free: list[Time] = [0] * p
        self.begins: list[Time] = [0] * p
        self.slots: list[Slot] | None = [] if slots else None
        self._times = times
        self._backward = [t.input_gradient + t.weight_gradient for t in times]
        self._updated = [sum(t.update for t in times[w::p]) for w in range(p)]
        self._forth: list[deque[Time]] = [deque() for _ in range(p)]  # when inputs of F came
        self._back: list[deque[Time]] = [deque() for _ in range(p)]

    @property
    def beginnings(self) -> set[int]:
        """The sweeps in which a worker begins its forwards or backwards; they end `rounds` later."""
        return {w + more for w in range(self.routine.workers) for more in (0, self.routine.ahead(w))}

    def sweep(self, t: int) -> list[int]:
        """Do the F and B of sweep t. Returns the workers whose U is due."""
        routine, free, n, p = self.routine, self.free, self.routine.rounds, self.routine.workers
        sent: list[tuple[deque[Time], Time]] = []
        due = []
        for w in range(p):
            k = t - w
            if 0 <= k < n:
                stage, mb = routine.forward(w, k)
                begin = max(free[w], self._forth[w].popleft()) if stage else free[w]
                if not k:
                    self.begins[w] = begin
                free[w] = begin + self._times[stage].forward
                if stage < routine.stages - 1:
                    sent.append((self._forth[(w + 1) % p], free[w] + self._times[stage].forth))
                self._keep("F", stage, mb, w, begin)
            k -= routine.ahead(w)
            if 0 <= k < n:
                stage, mb = routine.backward(w, k)
                begin = max(free[w], self._back[w].popleft()) if stage < routine.stages - 1 else free[w]
                free[w] = begin + self._backward[stage]
                if stage:
                    sent.append((self._back[w - 1], free[w] + self._times[stage].back))
                self._keep("B", stage, mb, w, begin)
                if routine.updates(k):
                    due.append(w)
        for queue, came in sent:
            queue.append(came)
        return due

    def update(self, workers: Sequence[int], t: int) -> None:
        """Do the U of these workers, of all their stages."""
        for w in workers:
            begin = self.free[w]
            self.free[w] += self._updated[w]
            self._keep("U", w, self.routine.micro_batches - 1, w, begin)

    def state(self) -> State:
        """All times that later sweeps depend on."""
        return [list(self.free), *map(list, self._forth), *map(list, self._back)]

    def leap(self, moved: State) -> None:
        """Move these times on, as if sweeps had been done."""
        for at, by in zip([self.free, *self._forth, *self._back], moved, strict=True):
            for n, more in enumerate(by):
                at[n] += more

    def busy(self) -> list[Time]:
        """The seconds of the operations of each worker, over the whole routine."""
        m, p = self.routine.micro_batches, self.routine.workers
        each = [m * (t.forward + b) + t.update for t, b in zip(self._times, self._backward, strict=True)]
        return [sum(each[w::p]) for w in range(p)]

    def _keep(self, kind: Kind, stage: int, mb: int, w: int, begin: Time) -> None:
        if self.slots is not None:
            self.slots.append(Slot(begin, self.free[w], stage, Op(kind, mb)))
