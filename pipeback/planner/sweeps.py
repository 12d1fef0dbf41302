"""Sweeps: the workers of one pipeline, which hold a stage each and do at most one F, B, W and U per sweep.

    start = max(worker is free, input ended + message)        end = start + seconds of the operation

F is the forward of a micro-batch, I the gradient of its input, W that of the weights, B both, and U the update. In
sweep t a worker does F(t), I or B(t − ahead), and W(t − slack·(p − 1)). So the input of an F comes from the same sweep,
and that of an I or B from `slack` sweeps before. Each of these is a few passes over all workers at once: an F ends at
down + max over the workers up to here of (free − down), with `down` the time from the first worker's start to here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from pipeback.planner.routines import Routine
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.timeline import Slot, Time


class StageTimes(NamedTuple):
    """The seconds of a stage's operations on one micro-batch, and of messages from it to its neighbours."""

    forward: Time = 1
    input_gradient: Time = 1
    weight_gradient: Time = 0
    update: Time = 0  # of U, with what replicas exchange for it
    forth: Time = 0  # from the end of F until its output is with the next stage
    back: Time = 0  # from the end of I or B until its gradient is with the stage before


State = list[list[Time]]  # all times that later ones depend on


class Sweeps:
    """slots: keep every operation."""

    period = 1  # after so many sweeps the workers do the same again

    def __init__(self, routine: Routine, times: Sequence[StageTimes], slots: bool = False) -> None:
        p = routine.workers
        self.routine = routine
        self.free: list[Time] = [0] * p
        self.begins: list[Time] = []
        self.slots: list[Slot] | None = [] if slots else None
        self._forward = [t.forward for t in times]
        self._both = [t.input_gradient if routine.split else t.input_gradient + t.weight_gradient for t in times]
        self._weight = [t.weight_gradient for t in times]
        self._updated = [t.update for t in times]
        self._forth, self._back = [t.forth for t in times], [t.back for t in times]
        # between the start of F at the first worker and the start of F here, if nobody waits
        hops = [f + m for f, m in zip(self._forward[:-1], self._forth, strict=False)]
        self._down = list(accumulate(hops, initial=0 * self._forward[0]))
        self._up = list(accumulate((b + m for b, m in zip(self._both[:0:-1], self._back[:0:-1])), initial=0))
        self.forwards = self.free  # when the last F of each worker ended
        self._did = (False, 0, 0)  # in the last sweep: whether forwards, and the workers that did backwards
        # when the gradients of the last sweeps came to the worker before; the last worker's input is its own
        self._sent: deque[list[Time]] = deque([[0] * (p + 1)] * routine.slack, maxlen=routine.slack)

    @property
    def beginnings(self) -> set[int]:
        """The sweeps in which a worker begins its forwards, backwards or weight gradients; they end `rounds` later."""
        routine = self.routine
        turned = {routine.ahead(w) + late for w in range(routine.workers) for late in (0, routine.late(w))}
        return {0, *turned}

    def sweep(self, t: int) -> Sequence[int]:
        """Do the F, I or B, and W of sweep t. Returns the workers whose U is due."""
        routine, n = self.routine, self.routine.rounds
        first, last = self._workers(t)
        self._did = (t < n, first, last)
        if t < n:
            self._forwards(t)
        if first < last:
            self._backwards(t, first, last)
        elif self._sent:
            self._sent.append(self._sent[-1])
        if not routine.split:
            return self._due(t, first, last)
        k = t - routine.slack * (routine.workers - 1)
        if not 0 <= k < n:
            return []
        self.free = list(map(add, self.free, self._weight))
        self._keep("W", k, 0, routine.workers, self._weight)
        return range(routine.workers) if routine.updates(k) else []

    def update(self, workers: Sequence[int], t: int) -> None:
        """Do the U of these workers."""
        routine = self.routine
        for w in workers:
            self.free[w] += self._updated[w]
            if self.slots is not None:
                k = t - routine.ahead(w) - routine.late(w)
                self.slots.append(Slot(self.free[w] - self._updated[w], self.free[w], w, Op("U", k)))

    def state(self) -> State:
        """All times that later sweeps depend on."""
        return [list(self.free), *(sent[:-1] for sent in self._sent)]

    def leap(self, moved: State) -> None:
        """Move these times on, as if sweeps had been done."""
        self.free = list(map(add, self.free, moved[0]))
        self._sent.extend([[*map(add, sent, by), 0] for sent, by in zip(list(self._sent), moved[1:], strict=True)])

    def waits(self, before: State, rates: State) -> Iterator[tuple[Time, Time, Time, Time]]:
        """Of each operation of the last sweep: when its worker was free, when its input came, and the rates of both.

        before: the state before that sweep. rates: by how much each of its times has grown.
        """
        forward, first, last = self._did
        free, pace = before[0], rates[0]
        for w in range(1, len(free)) if forward else ():
            yield free[w], self.forwards[w - 1] + self._forth[w - 1], pace[w], pace[w - 1]
        for w in range(first, min(last, len(free) - 1)) if self._sent else ():
            yield self.forwards[w] if forward else free[w], before[1][w + 1], pace[w], rates[1][w + 1]

    def busy(self) -> list[Time]:
        """The seconds of the operations of each worker, over the whole routine."""
        m, updates = self.routine.micro_batches, self.routine.update_count
        weight = self._weight if self.routine.split else [0] * len(self.free)
        return [
            m * (f + b + w) + updates * u
            for f, b, w, u in zip(self._forward, self._both, weight, self._updated, strict=True)
        ]

    # -- one kind of operation of all workers ----------------------------------------------------------------------

    def _forwards(self, t: int) -> None:
        starts = list(map(add, accumulate(map(sub, self.free, self._down), max), self._down))
        self.begins = self.begins or starts
        self.free = self.forwards = list(map(add, starts, self._forward))
        self._keep("F", t, 0, len(self.free), self._forward)

    def _backwards(self, t: int, first: int, last: int) -> None:
        free = self.free[first:last]
        if self.routine.slack:
            came = self._sent[0]
            ends = list(map(add, map(max, free, came[first + 1 : last + 1]), self._both[first:last]))
        else:
            up = self._up
            starts = map(add, accumulate(map(sub, reversed(free), up), max), up)
            ends = list(map(add, starts, reversed(self._both)))[::-1]
        self.free = [*self.free[:first], *ends, *self.free[last:]]
        if self._sent:
            before = self._sent[-1]
            self._sent.append([*before[:first], *map(add, ends, self._back[first:last]), *before[last:]])
        self._keep("I" if self.routine.split else "B", t, first, last, self._both)

    def _workers(self, t: int) -> tuple[int, int]:
        """The first of the workers that do a backward in sweep t, and the one behind the last of them."""
        routine, p = self.routine, self.routine.workers
        since = t - routine.lead
        if not routine.slack:
            return (0, p) if 0 <= since < routine.rounds else (0, 0)
        first = p - 1 - since // routine.slack
        last = p - 1 - (since - routine.rounds) // routine.slack
        return max(0, first), min(max(0, last), p)

    def _due(self, t: int, first: int, last: int) -> Sequence[int]:
        routine = self.routine
        if routine.every == 1:
            return range(first, last)
        # workers that run fewer forwards ahead have come farther
        behind = first if routine.every or not routine.slack else max(first, last - 1)
        return [w for w in range(behind, last) if routine.updates(t - routine.ahead(w))]

    def _keep(self, kind: Kind, k: int, first: int, last: int, seconds: Sequence[Time]) -> None:
        if self.slots is None:
            return
        for w in range(first, last):
            mb = k if kind in "FW" else k - self.routine.ahead(w)
            self.slots.append(Slot(self.free[w] - seconds[w], self.free[w], w, Op(kind, mb)))
