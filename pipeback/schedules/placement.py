"""Placement: which worker holds which stages, and schedules that say what each worker does in which order.

The stages are cut into parts, which are neighbours. A worker holds one part, or several, its chunks; p workers hold

    neighbours   worker w part w
    loop         worker w parts w, p + w, 2p + w, …       (round robin)
    v            worker w parts w and 2p − 1 − w
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from pipeback.schedules.ops import Op

Kind = Literal["neighbours", "loop", "v"]
KINDS: tuple[Kind, ...] = ("neighbours", "loop", "v")


class Placement(NamedTuple):
    """parts: the stages of each part, upstream first. holders: the worker of each part."""

    parts: tuple[range, ...]
    holders: tuple[int, ...]

    @property
    def workers(self) -> int:
        return 1 + max(self.holders)

    @property
    def owner(self) -> list[int]:
        """The worker of each stage."""
        return [worker for part, worker in zip(self.parts, self.holders, strict=True) for _ in part]

    def chunks(self, worker: int) -> list[range]:
        """The parts of a worker, upstream first."""
        return [part for part, holder in zip(self.parts, self.holders, strict=True) if holder == worker]


def place(kind: Kind, workers: int, part: Sequence[int]) -> Placement:
    """Where stages are. part: the number of each stage's part; neighbours have one part, or every worker has as many.

    >>> place("v", 2, [0, 1, 1, 2, 3]).owner
    [0, 1, 1, 1, 0]
    """
    numbers = range(part[-1] + 1)
    bounds = [(part.index(n), len(part) - list(reversed(part)).index(n)) for n in numbers]
    turns = [n % workers for n in numbers]
    if kind == "v":
        turns = [w if n // workers % 2 == 0 else workers - 1 - w for n, w in enumerate(turns)]
    return Placement(tuple(range(*bound) for bound in bounds), tuple(turns))


WorkerProgram = Callable[[int, int, int], Iterator[tuple[int, Op]]]
"""(worker, workers, chunks per worker) -> the endless program of that worker: (its chunk, operation)."""


@dataclass(frozen=True)
class Placed:
    """A schedule that says what each worker does; that of a stage is what its worker does of it."""

    program: WorkerProgram
    placement: Placement

    def turns(self, worker: int) -> Iterator[tuple[Op, range]]:
        """Each operation of a worker, and the stages at which it is done, one after the other."""
        chunks = self.placement.chunks(worker)
        for chunk, op in self.program(worker, self.placement.workers, len(chunks)):
            yield op, chunks[chunk][::-1] if op.kind in "BI" else chunks[chunk]

    def worker(self, worker: int) -> Iterator[tuple[int, Op]]:
        """The endless program of a worker: stage and operation."""
        return ((s, op) for op, stages in self.turns(worker) for s in stages)

    def __call__(self, stage: int, stages: int) -> Iterator[Op]:
        worker = next(w for part, w in zip(*self.placement, strict=True) if stage in part)
        return (op for op, mine in self.turns(worker) if stage in mine)

    def whole_parts(self, worker: int) -> set[range]:
        """The parts of a worker whose backwards are whole, in the first flush and so in all."""
        split, left = set(), len(chunks := self.placement.chunks(worker))
        for chunk, op in self.program(worker, self.placement.workers, len(chunks)):
            split |= {chunk} if op.kind == "I" else set()
            left -= op.kind == "U"
            if not left:
                break
        return {part for n, part in enumerate(chunks) if n not in split}

    def until(self, worker: int, n: int) -> Iterator[tuple[int, Op]]:
        """The operations of a worker on the first n micro-batches, and the updates that complete them."""
        left = sum(map(len, self.placement.chunks(worker))) if n else 0
        for s, op in self.worker(worker) if left else ():
            if op.kind == "U" and op.mb >= n - 1:
                yield s, Op("U", n - 1)
                left -= 1
                if not left:
                    return
            elif op.mb < n:
                yield s, op


def unwaited(schedule: Placed) -> Placed:
    """The same schedule, with whole backwards in the first part where the gradient of the weights follows at once.

    No other worker waits for what I gives there, and to split a backward costs some time: B then does what I and W do.
    """
    return Placed(partial(_first_chunk_whole, schedule.program), schedule.placement)


def _first_chunk_whole(program: WorkerProgram, worker: int, workers: int, chunks: int) -> Iterator[tuple[int, Op]]:
    mine = program(worker, workers, chunks)
    return mine if worker else _joined(mine)


def _joined(program: Iterator[tuple[int, Op]]) -> Iterator[tuple[int, Op]]:
    """The program of a worker, with B in the place of I and W of its first chunk where W is the next operation."""
    kept: tuple[int, Op] | None = None
    for chunk, op in program:
        if kept is not None:
            both = (chunk, op) == (0, Op("W", kept[1].mb))
            yield (0, Op("B", op.mb)) if both else kept
            kept = None
            if both:
                continue
        if (chunk, op.kind) == (0, "I"):
            kept = chunk, op
        else:
            yield chunk, op
    if kept is not None:
        yield kept
