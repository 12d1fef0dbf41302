"""Operations: what one stage does, as data: the forward F and the backward B of a micro-batch, and the update U.

A schedule may split B into I, the gradient of the input, and W, the gradient of the weights, which comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "U"]


class Op(NamedTuple):
    """One operation of a stage; a U names the last micro-batch that it includes."""

    kind: Kind
    mb: int

    def __str__(self) -> str:
        return f"{self.kind}{self.mb}"


Schedule = Callable[[int, int], Iterator[Op]]
"""(stage, stages) -> the endless program of that stage, micro-batches counted from 0."""


def endless(schedule: Schedule, stage: int, stages: int) -> Iterator[Op]:
    """The program of a stage, which raises RuntimeError where it ends."""
    return chain(schedule(stage, stages), _end(schedule, stage, stages))


def _end(schedule: Schedule, stage: int, stages: int) -> Iterator[Op]:
    raise ended(schedule, stage, stages)
    yield


def ended(schedule: Schedule, stage: int, stages: int) -> RuntimeError:
    """The error of a program that ends."""
    count = sum(1 for _ in schedule(stage, stages))
    name = getattr(schedule, "__qualname__", None) or repr(schedule)
    return RuntimeError(
        f"stage {stage}: the program of the schedule {name} ended after {count} operations, but programs are endless; "
        "let it count micro-batches by itertools.count()"
    )


def until(program: Iterator[Op], n: int, backwards: int = 0, updated: int = 0) -> Iterator[Op]:
    """The operations of `program` on the first n micro-batches, and the update that completes them.

    backwards, updated: how far a program that has begun has come: so many micro-batches have gone backward (B, or W
    where it is split), and the first `updated` of them are in the weights. If the end falls inside a flush or a group,
    its update follows the last backward and names micro-batch n − 1, so that no gradient is lost.

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
            backwards += op.kind in ("B", "W")
            yield op
    if updated < n:
        yield Op("U", n - 1)
