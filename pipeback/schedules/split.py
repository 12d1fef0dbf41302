"""Split: programs whose backward is two operations, I, the gradient of the input, and W, that of the weights.

The stage before waits for I alone, so that W can be done later, where a worker would be idle. An update (U) follows the
last W of its group. All these programs, and those without a split, are *rounds*; S is the number of stages, s a stage.
In round r of n micro-batches, a stage does

    F(r + ahead)     I(r) or B(r)     W(r − late)     U

each as far as its micro-batch exists. The grids show three stages; F, I and W take one unit of time each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from pipeback.schedules.ops import Op, Schedule
from pipeback.schedules.programs import Flowing, positive


def rounds(n: int, ahead: int, *, late: int = 0, split: bool = False, every: int = 0) -> Iterator[Op]:
    """The rounds of n micro-batches, one stage's, with an update after every `every`-th backward and the last one.

    ahead: forwards before the first backward, beside that of its round. split: whether I and W are operations of their
    own. late: rounds that W comes after I, or that an update comes after its B. every: 0 means one update at the end.
    """
    for r in range(-ahead, n + late):
        if 0 <= r + ahead < n:
            yield Op("F", r + ahead)
        if 0 <= r < n:
            yield Op("I" if split else "B", r)
        if 0 <= r - late < n:
            if split:
                yield Op("W", r - late)
            if r - late == n - 1 or (every and (r - late + 1) % every == 0):
                yield Op("U", r - late)


def zb_h1(micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with W late by s, which fills the bubble and holds no more micro-batches than 1F1B does.

    micro_batches: M, micro-batches per flush. The bubble is (S − 1)(F + I − W), in units of time; at stage s at most
    S − s micro-batches are between F and I, and s between I and W. D = 0. Qi et al., arXiv 2401.10241, section 2.3.
    """
    # zb_h1(4):  0 │ F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    #            1 │ .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    #            2 │ .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    return partial(_zero_bubble, 1, positive("micro_batches", micro_batches))


def zb_h2(micro_batches: int) -> Schedule:
    """ZB-H2: stage s runs 2(S − 1 − s) forwards ahead, with W late by 2s; the bubble is (S − 1)(F + I − 2W).

    micro_batches: M, micro-batches per flush. With F = I = W no worker is idle between its first and its last
    operation. 2S − 1 micro-batches are held at every stage, between F and I or between I and W. D = 0. The same paper,
    section 2.4.
    """
    # zb_h2(6):  0 │ F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    #            1 │ .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    #            2 │ .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    return partial(_zero_bubble, 2, positive("micro_batches", micro_batches))


def _zero_bubble(slack: int, m: int, stage: int, stages: int) -> Iterator[Op]:
    for first in count(0, m):
        for kind, i in rounds(m, slack * (stages - 1 - stage), late=slack * stage, split=True):
            yield Op(kind, first + i)


def zero_bubble_in_flight(schedule: Schedule, stage: int, stages: int) -> int | None:
    """The most micro-batches that a stage holds between F and W under `zb_h1` or `zb_h2`; None for other schedules."""
    if not isinstance(schedule, partial) or schedule.func is not _zero_bubble:
        return None
    slack, m = schedule.args
    return int(min(m, slack * (stages - 1) + 1))


def whole_in_flight(schedule: Schedule, stage: int, stages: int) -> int | None:
    """The most micro-batches between F and I under `zb_h1` or `zb_h2`; None for other schedules."""
    if not isinstance(schedule, partial) or schedule.func is not _zero_bubble:
        return None
    slack, m = schedule.args
    return int(min(m, slack * (stages - 1 - stage) + 1))


def late(slack: int = 2, late: int = 1) -> Schedule:
    """No flush, and W late by `late` micro-batches: the program of `flowing` with a split backward.

    Stage s runs slack · (S − 1 − s) forwards ahead; I(i) is sent upstream at once, and W(i) and its update come `late`
    rounds later. D = slack · (S − 1 − s) + late.
    """
    # late(1):   0 │ F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 …
    #            1 │ .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 …
    #            2 │ .  .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 F4 …
    return Late(positive("slack", slack, least=0), positive("late", late))


@dataclass(frozen=True)
class Late:
    """The schedule that `late` describes."""

    slack: int
    late: int

    def __call__(self, stage: int, stages: int) -> Iterator[Op]:
        ahead = self.slack * (stages - 1 - stage)
        yield from (Op("F", i) for i in range(ahead))
        for i in count():
            yield Op("F", i + ahead)
            yield Op("I", i)
            if i >= self.late:
                yield Op("W", i - self.late)
                yield Op("U", i - self.late)


def splits(schedule: Schedule, stages: int = 1) -> bool:
    """Whether the backwards of a schedule are split; those of the last of so many stages are, if any is."""
    if isinstance(schedule, Flowing):
        return False
    return next(op.kind for op in schedule(stages - 1, stages) if op.kind in "BI") == "I"


def after(program: Iterator[Op], skipped: int) -> tuple[Op, int]:
    """The operation of a program that comes after so many, and the number of W before it.

    A W is not counted among these: what it would do may have been done before, and it does nothing then.
    """
    done = 0
    for op in program:
        if not skipped:
            return op, done
        skipped -= op.kind != "W"
        done += op.kind == "W"
    raise ValueError("the program has ended")


def whole(schedule: Schedule) -> Schedule:
    """The same schedule with whole backwards: B in the place of I, and no W.

    Where every update includes all backwards before it, as at the end of a flush, the weights are the same.
    """
    return partial(_whole, schedule)


def _whole(schedule: Schedule, stage: int, stages: int) -> Iterator[Op]:
    for op in schedule(stage, stages):
        if op.kind != "W":
            yield Op("B", op.mb) if op.kind == "I" else op


def unsplit(schedule: Schedule) -> Schedule:
    """The schedule of which `whole` has made this one, or this one."""
    if isinstance(schedule, partial) and schedule.func is _whole:
        return schedule.args[0]  # type: ignore[no-any-return]
    return schedule
