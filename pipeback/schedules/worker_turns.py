"""Worker turns: the order in which a worker that holds several parts of the stages does their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeback.schedules.ops import Kind, Op, Schedule, endless
from pipeback.schedules.placement import Placed


class Turns:
    """The stages at which a worker does its next operation, one by one. turns: endless, from `Placed.turns`."""

    def __init__(self, turns: Iterator[tuple[Op, range]]) -> None:
        self._turns = turns
        self.stages = next(turns)[1]

    def advance(self) -> None:
        self.stages = next(self._turns)[1]


def turns_of(placed: Placed | None) -> list[Turns]:
    """Those of every worker, if the schedule says them."""
    return [] if placed is None else [Turns(placed.turns(worker)) for worker in range(placed.placement.workers)]


def programs(schedule: Schedule, stages: int) -> list[Iterator[Op]]:
    """That of each stage; where the schedule says what each worker does, stages of a part share one."""
    if not isinstance(schedule, Placed):
        return [endless(schedule, s, stages) for s in range(stages)]
    shared = [(schedule(part.start, stages), part) for part in schedule.placement.parts]
    return [program for program, part in shared for _ in part]


def firsts(every: Sequence[Iterator[Op]]) -> list[Op | None]:
    """Take the first operation of each program, of a shared one once."""
    found = {program: next(program) for program in dict.fromkeys(every)}
    return [found[program] for program in every]


def by_worker(
    workers: Sequence[Turns],
    ready: Callable[[int], bool],
    take: Callable[[int, Op], tuple[int, int]],
    columns: Sequence[list[Any]],
) -> Iterator[tuple[Kind, Sequence[tuple[int, int]]]]:
    """Yield what each worker does, in its own order: its next operation, (stage, micro-batch), at all stages of a part,
    one after the other: backwards of a micro-batch from the last stage on.

    ready: whether the next operation of a stage may be done. take: counts it as done. columns: what is counted per
    stage, the next operations first; it is the same at all stages of a part, whose programs are one.
    """
    moved = True
    while moved:
        moved = False
        for turns in workers:
            while ready(first := turns.stages[0]):
                moved, stages, head = True, turns.stages, columns[0][first]
                _, i = take(first, head)
                part = slice(min(stages), max(stages) + 1)
                for column in columns:
                    column[part] = [column[first]] * len(stages)
                yield head.kind, [(s, i) for s in stages]
                turns.advance()
