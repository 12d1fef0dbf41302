"""What one stage does, as data: forward F, backward B, update U, each of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "U"]


class Op(NamedTuple):
    """One operation of a stage; a U names the last micro-batch that it includes."""

    kind: Kind
    mb: int

    def __str__(self) -> str:
        return f"{self.kind}{self.mb}"


Schedule = Callable[[int, int], Iterator[Op]]
"""(stage, stages) -> the endless program of that stage, micro-batches counted from 0."""


def until(program: Iterator[Op], n: int, backwards: int = 0, updated: int = 0) -> Iterator[Op]:
    """The operations of `program` on the first n micro-batches, the ragged end included.

    A program already under way is cut by saying how far it is: `backwards` micro-batches have gone backward,
    the first `updated` of them are in the weights. When the end falls inside a flush or a group, its update
    is issued after the last backward and names micro-batch n − 1, so nothing that went forward is lost.

    >>> from pipeback.schedules.programs import fill_drain
    >>> " ".join(map(str, until(fill_drain(2)(0, 1), 3)))
    'F0 F1 B0 B1 U1 F2 B2 U2'
    """
    while backwards < n:
        op = next(program)
        if op.kind == "U":
            updated = op.mb + 1
            yield op
        elif op.mb < n:
            backwards += op.kind == "B"
            yield op
    if updated < n:
        yield Op("U", n - 1)
