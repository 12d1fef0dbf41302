"""Flushes: schedules that consist of equal groups of micro-batches, whose operations may be done in any order that data
flow allows, since all of them run on the same weights.

These are flushes, which begin and end with an empty pipeline; and the groups between two updates of a pipeline that is
never emptied, if a method runs each of them on one older version of the weights.
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
    """A schedule of flushes of `every` micro-batches. slack: not 0 if the pipeline is never emptied: how many forwards
    a stage runs ahead of the next one. turns: 0, since stages are not all busy at a tick.
    """

    schedule: Schedule
    every: int
    slack: int = 0
    turns: int = 0
    begins = 0

    def updated(self, backwards: int) -> int:
        """How many of the micro-batches that have gone backward are in the weights between two flushes."""
        return backwards

    def rounds(self, stage: int, stages: int, first: int) -> Iterator[Op]:
        """The rest of the program of a stage, from the flush that begins with micro-batch `first`."""
        for kind, i in self.schedule(stage, stages):
            yield Op(kind, i + first)


class FlushSpan(NamedTuple):
    """All stages, at the beginning of a flush or a group. ticks: its micro-batches, which have all arrived."""

    stages: range
    ticks: int


def in_flushes(schedule: Schedule) -> Flushes | None:
    """Return a schedule as flushes, or groups of several micro-batches; None if it has none.

    >>> from pipeback.schedules.programs import flowing, one_f_one_b
    >>> in_flushes(one_f_one_b(4)).every, in_flushes(flowing(1, every=3)).every, in_flushes(flowing(2))
    (4, 3, None)
    """
    if isinstance(schedule, Flowing):
        return None if schedule.every == 1 else Flushes(schedule, schedule.every, schedule.slack)
    inner = unsplit(schedule)
    known = flushed_in_flight, zero_bubble_in_flight
    if isinstance(inner, partial) and any(count(inner, 0, 1) is not None for count in known):
        return Flushes(schedule, flush(inner))
    return None


def flying(schedule: Schedule, stages: int) -> list[int]:
    """Return for every stage the most micro-batches in flight within the flushes of such a schedule, if B is whole."""
    inner = unsplit(schedule)
    if isinstance(inner, Flowing):
        return [inner.slack * (stages - 1 - s) + 1 for s in range(stages)]
    known = [flushed_in_flight(inner, s, stages) or whole_in_flight(inner, s, stages) for s in range(stages)]
    return [n for n in known if n is not None]


def next_flush(
    flow: Flushes, forwards: Sequence[int], backwards: Sequence[int], updated: Sequence[int], arrived: int
) -> FlushSpan | None:
    """Return the flush or the group that begins now; None if the pipeline is not empty, or not all is here by which
    stage 0 updates.

    forwards, backwards, updated: per stage, the micro-batches that have gone so far.

    >>> from pipeback.schedules.programs import fill_drain, flowing
    >>> next_flush(in_flushes(fill_drain(4)), [8, 8], [8, 8], [8, 8], 12)
    FlushSpan(stages=range(0, 2), ticks=4)
    >>> next_flush(in_flushes(flowing(1, every=4)), [8, 8], [8, 8], [8, 8], 12) is None
    True
    """
    first, every, ahead = updated[0], flow.every, flow.slack * (len(forwards) - 1)
    if arrived - first < every + ahead or first % every:
        return None
    return FlushSpan(range(len(forwards)), every) if {*forwards, *backwards, *updated} == {first} else None


def next_group(flow: Flushes, forwards: Sequence[int], arrived: int) -> int | None:
    """Return the micro-batch with which a group begins that can be done as a whole, if the forwards before it are done
    and none after it; None if none can.

    >>> from pipeback.schedules.programs import flowing
    >>> next_group(in_flushes(flowing(1, every=4)), [9, 8], 17)
    12
    """
    first = -(-forwards[0] // flow.every) * flow.every
    return first if flow.slack and arrived - first >= flow.every + flow.slack * (len(forwards) - 1) else None
