"""Foreseen: a program whose next operations can be looked at in advance, and what each worker does next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pipeback.schedules.ops import Kind, Op


class Foreseen(Iterator[Op]):
    """A program whose next operations can be looked at in advance."""

    def __init__(self, program: Iterator[Op]) -> None:
        self._program = program
        self._seen: deque[Op] = deque()

    def __next__(self) -> Op:
        return self._seen.popleft() if self._seen else next(self._program)

    def run(self, head: Op, forwards: int, backwards: int, most: int) -> int:
        """How many operations from `head` on could be done in a row, `most` at most.

        forwards, backwards: how many the stages before and behind have done.
        """
        for n, op in enumerate((head, *self.look(most))):
            if (op.kind == "F" and op.mb >= forwards) or (op.kind in "BI" and op.mb >= backwards):
                return n
        return most

    def look(self, most: int) -> Iterator[Op]:
        """Yield the next operations without taking them, `most` at most."""
        for n in range(most):
            if n == len(self._seen):
                op = next(self._program, None)
                if op is None:
                    return
                self._seen.append(op)
            yield self._seen[n]


class Turns:
    """The stages at which a worker does its next operation, one by one. turns: endless, from `Placed.turns`."""

    def __init__(self, turns: Iterator[tuple[Op, Sequence[int]]]) -> None:
        self._turns = turns
        self.stages = next(turns)[1]

    def advance(self) -> None:
        self.stages = next(self._turns)[1]


def in_turn(
    every: Sequence[Turns],
    heads: Sequence[Op | None],
    ready: Callable[[int], bool],
    take: Callable[[int, Op], tuple[int, int]],
) -> Iterator[tuple[Kind, list[tuple[int, int]]]]:
    """Do what each worker does next, at all stages of one of its parts, as long as any can; yield it as waves.

    heads: the next operation of each stage. ready: whether that of a stage can be done. take: counts it as done.
    """
    moved = True
    while moved:
        moved = False
        for turns in every:
            while ready(turns.stages[0]):
                moved, kind, ops = True, heads[turns.stages[0]], []
                for s in turns.stages:
                    head = heads[s]
                    assert head is not None  # programs of workers are endless
                    ops.append(take(s, head))
                assert kind is not None
                yield from [(kind.kind, [op]) for op in ops] if kind.kind in "BI" else [(kind.kind, ops)]
                turns.advance()
