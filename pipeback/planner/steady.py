"""Steady state: finds how many sweeps would be like those before, so that they need not be stepped through.

The times of a sweep follow from those of a few sweeps before by sums and maxima alone, so that

    if all times are those of some earlier sweep and one common number more, this goes on as it was since then.

Where workers still have rates of their own, because a queue grows before the slowest of them, all times may grow by the
same amounts in every sweep. That goes on until an input which grows faster than its worker overtakes it, or slower:

    n = (worker is free − input came) / (rate of the input − rate of the worker)

Either ends where a worker begins or ends its forwards or backwards, which is known beforehand. The sweeps that would be
alike are leapt over at once. Nothing is taken on trust: the result is that of stepping through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from operator import sub
from typing import Protocol

from pipeback.planner.routines import Routine
from pipeback.planner.sweeps import State, Sweeps
from pipeback.schedules.timeline import Time

ROUNDING = 2e-15  # of the time, per sweep: what differs by less is equal, but for rounding
TRY, REST = 8, 32  # growth by equal amounts is looked for in so many of so many sweeps


class Workers(Protocol):
    """The workers of one replica."""

    routine: Routine
    period: int
    free: list[Time]
    begins: list[Time]

    @property
    def beginnings(self) -> set[int]: ...
    def sweep(self, t: int) -> Sequence[int]: ...
    def update(self, workers: Sequence[int], t: int) -> None: ...
    def state(self) -> State: ...
    def leap(self, moved: State) -> None: ...
    def busy(self) -> list[Time]: ...


class Steadiness:
    """Watches the workers of all replicas."""

    def __init__(self, pipes: Sequence[Workers]) -> None:
        routine = pipes[0].routine
        self._pipes, self._routine = pipes, routine
        self._period = pipes[0].period * max(1, routine.every)
        begin = pipes[0].beginnings
        self._edges = sorted(begin | {t + routine.rounds for t in begin})
        self.sweeps = self._edges[-1]
        self._full = (max(begin), routine.rounds)  # between these sweeps, all workers do everything
        self.seconds: Time | None = None  # per micro-batch in the steady state
        self._begin()

    def _begin(self) -> None:
        self._since = self._wait = 0  # sweeps since this began, and after which the reference is taken anew
        self._reference: list[State] | None = None
        self._last: list[State] = []
        self._rates: list[State] = []
        self._alike = 0

    def leap(self, t: int) -> int:
        """Before sweep t: move the workers on over sweeps that are alike. Returns how many sweeps."""
        if self._edges[0] <= t:
            while self._edges and self._edges[0] <= t:
                del self._edges[0]
            self._begin()
        left = self._edges[0] - t - 1 if self._edges else 0  # the last sweep may have the update of a flush
        if left < 4 * self._period and self._reference is None:
            return 0
        now = [pipe.state() for pipe in self._pipes]
        self._since += 1
        found = self._repeated(now, t, left) or self._growing(now, t, left)
        if self._reference is None or self._since > self._wait:
            self._reference, self._wait, self._at = now, 2 * self._since, self._since
        return found

    def _repeated(self, now: list[State], t: int, left: int) -> int:
        """Leap, if all times are those of the reference and one number more."""
        passed = self._since - self._at if self._reference is not None else 0
        if self._reference is None or passed % self._period or not passed:
            return 0
        more = now[0][0][0] - self._reference[0][0][0]
        small = ROUNDING * float(now[0][0][0]) * float(passed + 4)
        for state, before in zip(now, self._reference, strict=True):
            for at, then in zip(state, before, strict=True):
                if not all(-small <= a - b - more <= small for a, b in zip(at, then, strict=True)):
                    return 0
        self._settled(t - passed, t, more)
        count = left // passed
        if count:
            self._move([[[count * more] * len(at) for at in state] for state in now])
        return count * passed

    def _growing(self, now: list[State], t: int, left: int) -> int:
        """Leap, if all times have grown by the same amounts for long enough."""
        pipe = self._pipes[0]
        if self._period > 1 or len(self._pipes) > 1 or not isinstance(pipe, Sweeps):
            return 0
        if self._since % REST > TRY + self._routine.slack:
            self._last, self._rates, self._alike = [], [], 0
            return 0
        rates = [list(map(sub, a, b)) for a, b in zip(now[0], self._last[0], strict=True)] if self._last else []
        small = 4 * ROUNDING * float(max(now[0][0]))
        alike = bool(self._rates and rates) and all(
            abs(a - b) <= small for x, y in zip(rates, self._rates[0], strict=True) for a, b in zip(x, y, strict=True)
        )
        before, self._last, self._rates = self._last, now, [rates] if rates else []
        self._alike = self._alike + 1 if alike else 0
        if self._alike <= self._routine.slack + 1:
            return 0
        self._alike = 0
        if max(rates[0]) - min(rates[0]) <= small:
            self._settled(t - 1, t, rates[0][0])
        count = min(left, _until_overtaken(pipe, before[0], rates, small))
        if count < 2:
            return 0
        self._move([[[count * rate for rate in some] for some in rates]])
        return count

    def _settled(self, since: int, t: int, more: Time) -> None:
        """Note that all times have grown by as much since an earlier sweep."""
        if self._full[0] <= since and t <= self._full[1]:
            self.seconds = more * self._routine.chunks / (t - since)

    def _move(self, moved: list[State]) -> None:
        for pipe, by in zip(self._pipes, moved, strict=True):
            pipe.leap(by)
        self._begin()


def _until_overtaken(pipe: Sweeps, before: State, rates: State, small: float) -> int:
    """The sweeps for which every operation goes on to wait for what it waits for now. before: the last sweep."""
    fewest = float("inf")
    for free, came, pace, other in pipe.waits(before, rates):
        gap, closing = (free - came, other - pace) if free >= came else (came - free, pace - other)
        if closing > small:
            fewest = min(fewest, floor(float(gap / closing)))
    return int(min(fewest, 2**62))
