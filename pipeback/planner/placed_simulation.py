"""Placed simulation: how long placed routines take, without a look at every micro-batch.

Looped BFS does a stage's F, or B, of all micro-batches in a row. If micro-batch i comes at max over k of (a_k + b_k·i),
and each takes f, then it ends at

    max(free + (i + 1)·f,  max over k of (a_k + f + max(b_k, f)·i))

which has the same form again, so that a flush is as many steps as there are stages.

A worker of ZB-V repeats F I W of its first stage and F I W of its second one, and all inputs come from the same round
or the one before. If all operations of a round end as much later than those of an earlier round, this goes on until a
worker runs out of forwards: of a longer flush, rounds in between are as long, and are not stepped through.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeback.planner.placed_routines import PlacedRoutine
from pipeback.planner.steady import ROUNDING
from pipeback.planner.sweeps import StageTimes
from pipeback.schedules.ops import Op
from pipeback.schedules.timeline import Place, Slot, Time, needs

PERIODS = range(1, 7)  # rounds after which all may be alike


class PlacedTimes:
    """The workers of one replica, before their updates.

    begins, free: when each begins its first operation and ends its last one. steady: seconds per micro-batch in rounds
    that are alike; None if there are none. slots: every operation, if they were asked for.
    """

    def __init__(self, routine: PlacedRoutine, times: Sequence[StageTimes], slots: bool = False) -> None:
        self.routine, self.times = routine, times
        self.slots: list[Slot] | None = [] if slots else None
        self.steady: Time | None = None
        self.begins: list[Time] = []
        self.free: list[Time] = []
        if slots:
            self.stepped()
        elif routine.split:
            self._rounds()
        else:
            self._rows()

    def update(self, start: Sequence[Time]) -> None:
        """Do the update of every worker, which begins no sooner than that."""
        for w, begin in enumerate(start):
            self.free[w] = begin + sum(self.times[s].update for s in self.routine.held(w))
            if self.slots is not None:
                self.slots.append(Slot(begin, self.free[w], w, Op("U", self.routine.micro_batches - 1)))

    def busy(self) -> list[Time]:
        """The seconds of the operations of each worker."""
        m = self.routine.micro_batches
        each = [m * (t.forward + t.input_gradient + t.weight_gradient) + t.update for t in self.times]
        return [sum(each[s] for s in self.routine.held(w)) for w in range(self.routine.workers)]

    # -- every operation -------------------------------------------------------------------------------------------

    def stepped(self) -> dict[Place, Time]:
        """Do every operation of the routine; returns when each has ended."""
        routine = self.routine
        each = [t.input_gradient if routine.split else t.input_gradient + t.weight_gradient for t in self.times]
        seconds = {
            "F": [t.forward for t in self.times], "B": each, "I": each, "W": [t.weight_gradient for t in self.times]
        }  # fmt: skip
        programs = [routine.program(w) for w in range(routine.workers)]
        heads = [next(program) for program in programs]
        self.free, self.begins = [0] * routine.workers, [0] * routine.workers
        ended: dict[Place, Time] = {}
        blocked: dict[Place, int] = {}
        todo = list(range(routine.workers))
        while todo:
            w = todo.pop()
            while heads[w][1].kind != "U":
                s, op = heads[w]
                before = needs(op, s, routine.stages)
                start = self.free[w]
                if before is not None:
                    if before not in ended:
                        blocked[before] = w
                        break
                    start = max(start, ended[before] + self._sent(before, w))
                end = start + seconds[op.kind][s]
                if (op.kind, s, op.mb) == ("F", w, 0):
                    self.begins[w] = start
                ended[op.kind, s, op.mb] = self.free[w] = end
                if self.slots is not None:
                    self.slots.append(Slot(start, end, s, op))
                if (other := blocked.pop((op.kind, s, op.mb), None)) is not None:
                    todo.append(other)
                heads[w] = next(programs[w])
        return ended

    def _sent(self, before: Place, worker: int) -> Time:
        """The seconds of a message from this operation to a worker."""
        kind, s, _ = before
        if self.routine.holder(s) == worker:
            return 0
        return self.times[s].forth if kind == "F" else self.times[s].back

    # -- ZB-V ------------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        """Do a shorter flush, and add the rounds that would be alike."""
        whole, m = self.routine, self.routine.micro_batches
        few = 4 * whole.workers + 8
        while few < m:
            self.routine = whole._replace(micro_batches=few)
            ended = self.stepped()
            found = self._alike(ended, few - 2 * whole.workers)
            if found is not None:
                period, more = found
                short = few + (m - few) % period
                if short != few:
                    self.routine = whole._replace(micro_batches=short)
                    self.stepped()
                count = (m - short) // period
                self.free = [one + count * more for one in self.free]
                self.steady = more / period
                self.routine = whole
                return
            few *= 2
        self.routine = whole
        self.stepped()

    def _alike(self, ended: dict[Place, Time], last: int) -> tuple[int, Time] | None:
        """After how many rounds all end as much later in round `last`, and how much."""
        now = self._round(ended, last)
        for period in PERIODS:
            if last < period:
                return None
            before = self._round(ended, last - period)
            more = now[0] - before[0]
            small = ROUNDING * float(max(now)) * 4
            if all(-small <= a - b - more <= small for a, b in zip(now, before, strict=True)):
                return period, more
        return None

    def _round(self, ended: dict[Place, Time], n: int) -> list[Time]:
        """When the operations of the n-th round of every worker have ended."""
        p = self.routine.workers
        found: list[Time] = []
        for w in range(p):
            first, second = self.routine.held(w)
            found += [ended["F", first, 2 * p - 1 - w + n], ended["I", first, n], ended["W", first, n]]
            found += [ended["F", second, p + n], *(ended[kind, second, p - w + n] for kind in "IW")]
        return found

    # -- looped BFS ------------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        """Do each stage's operations on all micro-batches at once."""
        routine, times = self.routine, self.times
        p, m = routine.workers, routine.micro_batches
        self.free, self.begins = [0] * p, [0] * p
        came: list[tuple[Time, Time]] = []
        for s in range(routine.stages):
            if s < p:
                self.begins[s] = max((a for a, _ in came), default=0)
            came = self._row(s % p, came, times[s].forward, m)
            if p > 1:
                came = [(a + times[s].forth, b) for a, b in came]
        came = []
        for s in reversed(range(routine.stages)):
            came = self._row(s % p, came, times[s].input_gradient + times[s].weight_gradient, m)
            if p > 1:
                came = [(a + times[s].back, b) for a, b in came]

    def _row(self, w: int, came: list[tuple[Time, Time]], seconds: Time, m: int) -> list[tuple[Time, Time]]:
        """The ends of m operations in a row, whose inputs come so, as pairs: the i-th at the largest of a + b·i."""
        ends = [(self.free[w] + seconds, seconds), *((a + seconds, max(b, seconds)) for a, b in came)]
        found: list[tuple[Time, Time]] = []
        for a, b in sorted(ends, key=lambda end: (end[1], end[0]), reverse=True):
            if not found or a > found[-1][0]:  # else one that is steeper is later throughout
                found.append((a, b))
        self.free[w] = max(a + b * (m - 1) for a, b in found)
        return found
