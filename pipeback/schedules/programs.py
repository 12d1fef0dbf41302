"""Programs: how many forwards run ahead, how often a stage updates, and whether it flushes.

Each factory returns a `Schedule`: (stage, stages) -> the endless program of that stage. S is the number of stages, s a
stage, D its delay. The grids show three stages and one unit of time for each forward (F) and each backward (B); `.` is
idle; updates (U) take no time and are not shown. A schedule can be pickled, so that a method can be sent to other
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from pipeback.schedules.ops import Op, Schedule


def positive(name: str, value: int, least: int = 1) -> int:
    """Return an option that must be a whole number; raises ValueError, which names it, if it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}")
    return value


def fill_drain(micro_batches: int) -> Schedule:
    """GPipe: all forwards of a flush, all its backwards, one update (Huang et al., arXiv 1811.06965).

    micro_batches: micro-batches per flush, M. With one worker per stage, workers are idle for the share
    (S − 1)/(M + S − 1) of their time, the bubble. D = 0.
    """
    # fill_drain(4):  0 │ F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    #                 1 │ .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    #                 2 │ .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    return partial(_fill_drain, positive("micro_batches", micro_batches))


def _fill_drain(m: int, stage: int, stages: int) -> Iterator[Op]:
    for first in count(0, m):
        yield from (Op("F", i) for i in range(first, first + m))
        yield from (Op("B", i) for i in range(first, first + m))
        yield Op("U", first + m - 1)


def one_f_one_b(micro_batches: int) -> Schedule:
    """1F1B with a flush: stage s runs min(M, S − 1 − s) forwards ahead, then alternates (Narayanan et al., SC 2021).

    micro_batches: M, micro-batches per flush. The bubble is that of `fill_drain`; at most min(M, S − s) micro-batches
    are in flight at stage s. D = 0.
    """
    # one_f_one_b(4): 0 │ F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    #                 1 │ .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    #                 2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    return partial(_one_f_one_b, positive("micro_batches", micro_batches))


def _one_f_one_b(m: int, stage: int, stages: int) -> Iterator[Op]:
    ahead = min(m, stages - 1 - stage)
    for first in count(0, m):
        yield from (Op("F", i) for i in range(first, first + ahead))
        for i in range(first, first + m - ahead):
            yield Op("F", i + ahead)
            yield Op("B", i)
        yield from (Op("B", i) for i in range(first + m - ahead, first + m))
        yield Op("U", first + m - 1)


def flushed_in_flight(schedule: Schedule, stage: int, stages: int) -> int | None:
    """The most micro-batches in flight at a stage under `fill_drain` or `one_f_one_b`; None for other schedules."""
    if not isinstance(schedule, partial) or schedule.func not in (_fill_drain, _one_f_one_b):
        return None
    (m,) = schedule.args
    return int(m if schedule.func is _fill_drain else min(m, stages - stage))


def fills(schedule: Schedule) -> bool:
    """Whether it is `fill_drain`: no stage waits for a backward before all forwards of a flush are done."""
    return isinstance(schedule, partial) and schedule.func is _fill_drain


def sequential(schedule: Schedule) -> bool:
    """Whether no stage runs forwards ahead, so that one micro-batch is in flight at most."""
    return isinstance(schedule, Flowing) and not schedule.slack


def flush(schedule: Schedule) -> int:
    """The number of micro-batches before the first update, in a pipeline of one stage."""
    return next(op.mb for op in schedule(0, 1) if op.kind == "U") + 1


def flowing(slack: int = 2, every: int = 1) -> Schedule:
    """No flush: stage s runs slack · (S − 1 − s) forwards ahead and updates after every `every`-th backward.

    slack: 2 is pipelined backpropagation (full duplex, as if a forward and a backward took one unit of time together),
    1 is asynchronous 1F1B, and 0 is plain sequential training.
    every: micro-batches per update. With 1, the delay is the number of forwards that run ahead.
    """
    # flowing(2):     0 │ F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 ...
    #                 1 │ .  F0 F1 F2 B0 F3 B1 F4 B2 F5 ...
    #                 2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 ...
    #
    # flowing(1):     0 │ F0 F1 F2 .  .  B0 F3 B1 F4 B2 ...
    #                 1 │ .  F0 F1 .  B0 F2 B1 F3 B2 F4 ...
    #                 2 │ .  .  F0 B0 F1 B1 F2 B2 F3 B3 ...
    return Flowing(positive("slack", slack, least=0), positive("every", every))


@dataclass(frozen=True)
class Flowing:
    """The schedule that `flowing` describes."""

    slack: int
    every: int
    begins = 0  # the micro-batch from which its rounds are alike

    def __call__(self, stage: int, stages: int) -> Iterator[Op]:
        yield from (Op("F", i) for i in range(self.slack * (stages - 1 - stage)))
        yield from self.rounds(stage, stages)

    def rounds(self, stage: int, stages: int, first: int = 0) -> Iterator[Op]:
        """The rest of the program, from the round in which micro-batch `first` goes backward.

        A round is F, B and, after every `every`-th backward, U.
        """
        ahead = self.slack * (stages - 1 - stage)
        for i in count(first):
            yield Op("F", i + ahead)
            yield Op("B", i)
            if (i + 1) % self.every == 0:
                yield Op("U", i)

    @property
    def turns(self) -> int:
        """In how many ticks of the order "skewed" every stage does one F, one B and the U that is due after it, if any,
        once the pipeline is full: 1, or 2 if stages of even and of odd number take turns; 0 if neither is so.
        """
        return {2: 1, 1: 2}.get(self.slack, 0)

    def updated(self, backwards: int) -> int:
        """How many of the micro-batches that have gone backward are in the weights between two rounds."""
        return backwards - backwards % self.every
