"""Simulation: how long a routine takes at given times, who waits, and for how long.

A worker does its operations in the order of its routine, one at a time. An operation begins once the worker is free and
its input has come: a forward F waits for the F of the stage before and for the message from there, a backward (B, or I,
the gradient of the input) for that of the stage behind, and an update U, with several replicas, for all of them.
`sweeps` and `interleaved` do the operations, and `steady` leaps over those that would be alike; `placed_simulation`
does the routines that workers of several stages have of their own. Times may be numbers of any kind: with fractions,
all results are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from pipeback.planner.interleaved import InterleavedSweeps
from pipeback.planner.placed_routines import PlacedRoutine
from pipeback.planner.placed_simulation import PlacedTimes
from pipeback.planner.routines import Routine
from pipeback.planner.steady import Steadiness
from pipeback.planner.sweeps import StageTimes, Sweeps
from pipeback.schedules.timeline import Slot, Time


class Simulated(NamedTuple):
    """The times of a routine; of several replicas, those of the slowest."""

    seconds: Time  # from the first operation of all to the end of the last
    begins: list[Time]  # of each worker's first operation
    ends: list[Time]  # of each worker's last operation
    busy: list[Time]  # seconds of each worker's operations
    steady: Time | None  # seconds per micro-batch in the steady state; None if it was not reached
    slots: list[Slot]  # of the first replica, in order of their start, if they were asked for

    @property
    def bubble(self) -> float:
        """The idle share of the worker that is longest at work: 1 − busy/(end − begin), as papers count it."""
        spans = [(end - begin, busy) for begin, end, busy in zip(self.begins, self.ends, self.busy, strict=True)]
        span, busy = max(spans)
        return float(1 - busy / span) if span else 0.0

    @property
    def idle(self) -> float:
        """The idle share of all workers' time between the first operation of all and the last."""
        return float(1 - sum(self.busy) / (self.seconds * len(self.busy))) if self.seconds else 0.0


Times = StageTimes | Sequence[StageTimes] | Sequence[Sequence[StageTimes]]
UNIT = StageTimes()  # F and B take one unit of time each, all else none


def simulate(routine: Routine | PlacedRoutine, times: Times = UNIT, *, slots: bool = False) -> Simulated:
    """Run a routine.

    times: of every stage; or one entry per stage; or, for replicas that differ, one such list per replica.
    slots: keep every operation, for a picture; the steady state is then stepped through, too.

    >>> from pipeback.planner.routines import routine
    >>> found = simulate(routine("one_f_one_b", workers=4, micro_batches=8))
    >>> found.seconds, round(found.bubble, 4)
    (22, 0.2727)
    """
    if isinstance(routine, PlacedRoutine):
        return _placed(routine, _per_replica(times, routine.stages), slots=slots)
    kind = Sweeps if routine.chunks == 1 else InterleavedSweeps
    pipes = [kind(routine, each, slots and not n) for n, each in enumerate(_per_replica(times, routine.stages))]
    steady = Steadiness(pipes)
    t = 0
    while t < steady.sweeps:
        for pipe in pipes:
            due = pipe.sweep(t)
        if due:
            _together(pipes, due)
            for pipe in pipes:
                pipe.update(due, t)
        t += 1
        if not slots:
            t += steady.leap(t)
    slowest = max(pipes, key=lambda pipe: max(pipe.free))
    found = sorted(pipes[0].slots or (), key=lambda slot: slot.start)
    seconds = max(slowest.free) - min(slowest.begins)
    return Simulated(seconds, slowest.begins, slowest.free, slowest.busy(), steady.seconds, found)


def _placed(routine: PlacedRoutine, times: Sequence[Sequence[StageTimes]], *, slots: bool) -> Simulated:
    """The updates of a flush come last, and those of a worker begin together in all replicas."""
    pipes = [PlacedTimes(routine, each, slots and not n) for n, each in enumerate(times)]
    start = [max(pipe.free[w] for pipe in pipes) for w in range(routine.workers)]
    for pipe in pipes:
        pipe.update(start)
    slowest = max(pipes, key=lambda pipe: max(pipe.free))
    found = sorted(pipes[0].slots or (), key=lambda slot: slot.start)
    seconds = max(slowest.free) - min(slowest.begins)
    return Simulated(seconds, slowest.begins, slowest.free, slowest.busy(), slowest.steady, found)


def _together(pipes: Sequence[Sweeps | InterleavedSweeps], workers: Sequence[int]) -> None:
    """Let the same worker of all replicas begin its update together."""
    for w in workers if len(pipes) > 1 else ():
        start = max(pipe.free[w] for pipe in pipes)
        for pipe in pipes:
            pipe.free[w] = start


def _per_replica(times: Times, stages: int) -> list[list[StageTimes]]:
    if isinstance(times, StageTimes):
        return [[times] * stages]
    each = [list(some) for some in ([times] if times and isinstance(times[0], StageTimes) else times)]
    for some in each:
        if len(some) != stages:
            raise ValueError(f"times needs one entry per stage: {stages}, not {len(some)}; give those of each stage")
    return cast(list[list[StageTimes]], each)
