"""Spans: stages that do the same at a tick: one F (forward), one B (backward) and one U (update) each.

In the order "skewed", a pipeline without flushes consists of such ticks once it is full. After a pause they begin with
stage 0 and take in a stage more at each tick; before one they end with the last stage. f and b are the numbers of
micro-batches gone forward and backward at each stage s of S, D its delay:

    between two rounds    f − b = D                active    f < f of s − 1: an input waits; b < b of s + 1: a gradient

Where each loss is awaited before the next micro-batch comes, no two stages can do F at once. Then micro-batches take
turns: one goes forward through all stages, and after that B and U of all stages do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import and_, lt, sub
from typing import NamedTuple

from pipeback.schedules.flushes import FlushSpan


class TickSpan(NamedTuple):
    """Some stages, each or every second one of a range, that all do F, B and U at the next tick, and none else
    anything.

    ticks: for how many ticks it is certain to be so; where even and odd stages take turns, the other ones have every
    second of these.
    """

    stages: range
    ticks: int


class TurnSpan(NamedTuple):
    """So many micro-batches, here called ticks, that go one by one through all stages of a pipeline that is full: F of
    one stage after the other, then B and U of all.
    """

    stages: range
    ticks: int


Span = TickSpan | TurnSpan | FlushSpan


def next_turns(
    turns: int, forwards: Sequence[int], backwards: Sequence[int], updated: Sequence[int], arrived: int
) -> TurnSpan | None:
    """Return the micro-batches that can take turns now; None if stages have gone forward with different ones.

    The arguments are those of `next_span`.

    >>> next_turns(1, [9, 9, 9], [5, 7, 9], [5, 7, 9], 11)
    TurnSpan(stages=range(0, 3), ticks=2)
    """
    last, slack = len(forwards) - 1, 3 - turns
    if arrived == forwards[0] or backwards != updated or forwards.count(forwards[0]) <= last:
        return None
    if list(map(sub, forwards, backwards)) != list(range(slack * last, -1, -slack)):
        return None
    return TurnSpan(range(last + 1), arrived - forwards[0])


def next_span(
    turns: int, forwards: Sequence[int], backwards: Sequence[int], updated: Sequence[int], arrived: int
) -> TickSpan | None:
    """Return the span of the next tick; None if some stage does anything else.

    turns: 1 if every stage does a round at a tick (D = 2(S − 1 − s)), 2 if even and odd ones take turns (S − 1 − s).
    arrived: micro-batches that stage 0 can have.

    >>> next_span(1, [9, 8, 7], [5, 6, 7], [5, 6, 7], 12)
    TickSpan(stages=range(0, 3), ticks=3)
    >>> next_span(1, [9, 8, 7], [5, 6, 7], [5, 6, 7], 9)
    TickSpan(stages=range(1, 3), ticks=1)
    """
    last = len(forwards) - 1
    slack = 3 - turns
    if not last or backwards != updated or forwards[0] - backwards[0] != slack * last:  # mostly told by the latter
        return None
    if list(map(sub, forwards, backwards)) != list(range(slack * last, -1, -slack)):
        return None
    given = list(map(lt, forwards, [arrived, *forwards[:-1]]))
    able = list(map(and_, given, map(lt, backwards, [*backwards[1:], arrived])))
    if True not in able:
        return None
    stages = range(able.index(True), len(able) - able[::-1].index(True), turns)
    if not all(able[stages.start : stages.stop : turns]) or sum(able) < len(stages):
        return None
    if sum(able) > len(stages) or (turns == 1 and sum(given) > len(stages)):
        return None
    waiting = arrived - forwards[0]
    if len(stages) < len(range(stages.start % turns, last + 1, turns)) or not waiting:
        return TickSpan(stages, 1)
    return TickSpan(stages, turns * waiting - (turns - 1) * (stages.start == 0))  # then stage 0 waits


def following(
    span: Span, forwards: Sequence[int], backwards: Sequence[int], updated: Sequence[int], arrived: int
) -> TickSpan | None:
    """Return what `next_span` would after one tick of a span of neighbouring stages, where turns = 1: the ends of the
    span tell; None where they do not, nor after a flush or turns. The numbers are those after the tick.

    >>> following(TickSpan(range(0, 2), 1), [9, 8, 7], [5, 6, 7], [5, 6, 7], 9)
    TickSpan(stages=range(1, 3), ticks=1)
    """
    first, end, count = span.stages.start, span.stages.stop, len(forwards)
    if (
        not isinstance(span, TickSpan) or span.ticks > 1 or forwards[0] - backwards[0] < 2 * (count - 1)
    ):  # even and odd stages take turns
        return None
    if forwards[first] >= (forwards[first - 1] if first else arrived):
        first += 1
    behind = end if end == count else end + 1  # the last one's output is an input of the next
    if first >= end or updated[first] != backwards[first]:
        return None
    for s in range(end - 1, behind):
        if backwards[s] >= (backwards[s + 1] if s + 1 < count else arrived):
            return None
    if behind - first == count and forwards[0] < arrived:
        return None  # for how many ticks, `next_span` tells
    return TickSpan(range(first, behind), 1)
