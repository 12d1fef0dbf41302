"""Flushes: schedules that consist of equal flushes, each of so many micro-batches, which begin and end with an empty
pipeline.

All operations of a flush run on the same weights, so that they may be done in any order that data flow allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pipeback.schedules.ops import Op, Schedule
from pipeback.schedules.programs import Flowing, flush, flushed_in_flight
from pipeback.schedules.split import unsplit, whole_in_flight, zero_bubble_in_flight


@dataclass(frozen=True)
class Flushes:
    """A schedule of flushes of `every` micro-batches. turns: 0, since stages are not all busy at a tick."""

    schedule: Schedule
    every: int
    turns: int = 0

    def rounds(self, stage: int, stages: int, first: int) -> Iterator[Op]:
        """The rest of the program of a stage, from the flush that begins with micro-batch `first`."""
        for kind, i in self.schedule(stage, stages):
            yield Op(kind, i + first)


class FlushSpan(NamedTuple):
    """All stages, at the beginning of a flush. ticks: the micro-batches of the flush, which have all arrived."""

    stages: range
    ticks: int


def in_flushes(schedule: Schedule) -> Flushes | None:
    """Return a schedule as flushes of several micro-batches; None if it has none.

    >>> from pipeback.schedules.programs import flowing, one_f_one_b
    >>> in_flushes(one_f_one_b(4)).every, in_flushes(flowing(0, every=3)).every, in_flushes(flowing(2))
    (4, 3, None)
    """
    if isinstance(schedule, Flowing):
        return None if schedule.slack or schedule.every == 1 else Flushes(schedule, schedule.every)
    inner = unsplit(schedule)
    known = flushed_in_flight, zero_bubble_in_flight
    if isinstance(inner, partial) and any(count(inner, 0, 1) is not None for count in known):
        return Flushes(schedule, flush(inner))
    return None


def flying(schedule: Schedule, stages: int) -> list[int]:
    """Return for every stage the most micro-batches in flight within the flushes of such a schedule, if B is whole."""
    inner = unsplit(schedule)
    if isinstance(inner, Flowing):
        return [1] * stages
    known = [flushed_in_flight(inner, s, stages) or whole_in_flight(inner, s, stages) for s in range(stages)]
    return [n for n in known if n is not None]


def next_flush(
    every: int, forwards: Sequence[int], backwards: Sequence[int], updated: Sequence[int], arrived: int
) -> FlushSpan | None:
    """Return the flush that begins now; None if the pipeline is not empty, or not all of its micro-batches are here.

    forwards, backwards, updated: per stage, the micro-batches that have gone so far.

    >>> next_flush(4, [8, 8], [8, 8], [8, 8], 13)
    FlushSpan(stages=range(0, 2), ticks=4)
    """
    first = updated[0]
    if arrived - first < every or first % every or not all(first == n for n in (*forwards, *backwards, *updated)):
        return None
    return FlushSpan(range(len(forwards)), every)
