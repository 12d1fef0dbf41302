"""Foreseen: a program whose next operations can be looked at in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pipeback.schedules.ops import Op


class Foreseen(Iterator[Op]):
    """A program whose next operations can be looked at in advance. Its forwards are of one micro-batch after the other,
    and so are its backwards.
    """

    def __init__(self, program: Iterator[Op]) -> None:
        self._program = program
        self._seen: deque[Op] = deque()
        self._taken = self._read = 0  # how many operations were taken, and read from the program
        # of the operations seen: micro-batch and place of each forward and of each backward
        self._forwards: deque[tuple[int, int]] = deque()
        self._backwards: deque[tuple[int, int]] = deque()

    def __next__(self) -> Op:
        if not self._seen and not self._see():
            raise StopIteration
        op = self._seen.popleft()
        self._taken += 1
        for places in (self._forwards, self._backwards):
            if places and places[0][1] < self._taken:
                places.popleft()
        return op

    def run(self, head: Op, forwards: int, backwards: int, most: int) -> int:
        """How many operations from `head` on could be done in a row, `most` at most.

        head: the operation that was taken last. forwards, backwards: how many the stages before and behind have done.
        """
        if (head.kind == "F" and head.mb >= forwards) or (head.kind in "BI" and head.mb >= backwards):
            return 0
        for places, done in ((self._forwards, forwards), (self._backwards, backwards)):
            while not places or places[-1][0] < done:
                if len(self._seen) >= most or not self._see():
                    break
            else:
                n = places[max(0, done - places[0][0])][1] - self._taken + 1
                most = min(most, n)
        return most

    def _see(self) -> bool:
        """Read an operation of the program; return whether there is one."""
        op = next(self._program, None)
        if op is None:
            return False
        self._seen.append(op)
        if op.kind == "F":
            self._forwards.append((op.mb, self._read))
        elif op.kind in "BI":
            self._backwards.append((op.mb, self._read))
        self._read += 1
        return True


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
