"""Foreseen: a program whose next operations can be looked at in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pipeback.schedules.ops import Op


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


def richest(ready: list[int], near: deque[int], run: Callable[[int], int]) -> int:
    """The stage to run next: one of those that ran lately (`near`, where it is noted), whose weights may still be here,
    else the one with most to do. run: how many operations a stage could do in a row now.
    """
    lately = [s for s in ready if s in near]
    best = max(lately or ready, key=run)
    if best in near:
        near.remove(best)
    near.append(best)
    return best
