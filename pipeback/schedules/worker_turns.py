"""Worker turns: the order in which a worker that holds several parts of the stages does their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.placement import Placed


class Turns:
    """The stages at which a worker does its next operation, one by one. turns: endless, from `Placed.turns`."""

    def __init__(self, turns: Iterator[tuple[Op, Sequence[int]]]) -> None:
        self._turns = turns
        self.stages = next(turns)[1]

    def advance(self) -> None:
        self.stages = next(self._turns)[1]


def turns_of(placed: Placed | None) -> list[Turns]:
    """Those of every worker, if the schedule says them."""
    return [] if placed is None else [Turns(placed.turns(worker)) for worker in range(placed.placement.workers)]


def by_worker(
    workers: Sequence[Turns],
    heads: Sequence[Op | None],
    ready: Callable[[int], bool],
    take: Callable[[int, Op], tuple[int, int]],
) -> Iterator[tuple[Kind, Sequence[tuple[int, int]]]]:
    """Yield what each worker does, in its own order: its next operation, (stage, micro-batch), at all stages of a part,
    one after the other: backwards of a micro-batch from the last stage on.

    heads: the next operation of each stage. ready: whether that of a stage may be done. take: counts it as done.
    """
    moved = True
    while moved:
        moved = False
        for turns in workers:
            while ready(turns.stages[0]):
                moved, mine = True, [(s, head) for s in turns.stages if (head := heads[s]) is not None]
                kind = mine[0][1].kind
                yield kind, [take(s, head) for s, head in mine]
                turns.advance()
