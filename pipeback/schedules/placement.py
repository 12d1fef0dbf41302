"""Placement: which worker holds which stages, and schedules that say what each worker does in which order.

The stages are cut into parts, which are neighbours. A worker holds one part, or several, its chunks; p workers hold

    neighbours   worker w part w
    loop         worker w parts w, p + w, 2p + w, …       (round robin)
    v            worker w parts w and 2p − 1 − w
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
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

    def turns(self, worker: int) -> Iterator[tuple[Op, Sequence[int]]]:
        """Each operation of a worker, and the stages at which it is done, one after the other."""
        chunks = self.placement.chunks(worker)
        for chunk, op in self.program(worker, self.placement.workers, len(chunks)):
            yield op, chunks[chunk][::-1] if op.kind in "BI" else chunks[chunk]

    def worker(self, worker: int) -> Iterator[tuple[int, Op]]:
        """The endless program of a worker: stage and operation."""
        return ((s, op) for op, stages in self.turns(worker) for s in stages)

    def __call__(self, stage: int, stages: int) -> Iterator[Op]:
        worker = next(w for part, w in zip(*self.placement, strict=True) if stage in part)
        return (op for s, op in self.worker(worker) if s == stage)

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


def interleaved_turn(n: int, workers: int, chunks: int) -> tuple[int, int]:
    """(chunk, micro-batch) of a worker's n-th forward, and of its n-th backward with chunks counted from the last one.

    Each chunk has a group of as many micro-batches as there are workers, before the next chunk has them.
    """
    group, place = divmod(n, workers)
    turn, chunk = divmod(group, chunks)
    return chunk, turn * workers + place


def interleaved_lead(chunks: int) -> tuple[int, int]:
    """(forwards by which a worker is ahead of the next worker, groups by which the last is ahead of its backwards).

    With one chunk it is 1F1B, whose workers begin their backwards one forward earlier.
    """
    return (2, chunks - 1) if chunks > 1 else (1, 0)


def interleaved(micro_batches: int) -> WorkerProgram:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2), placed as a loop. p workers hold v chunks.

    micro_batches: M, micro-batches per flush; if p does not divide it, the last group of each chunk is smaller. Worker
    w runs 2(p − 1 − w) + (v − 1)p forwards ahead, then alternates. Its bubble is (p − 1)/(vM + p − 1) of its time.
    """
    # two workers, two chunks a and b, four micro-batches:
    #     0 │ F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
    #     1 │ .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a .
    return _Interleaved(micro_batches)


@dataclass(frozen=True)
class _Interleaved:
    micro_batches: int

    def __call__(self, worker: int, workers: int, chunks: int) -> Iterator[tuple[int, Op]]:
        m = self.micro_batches
        slack, groups = interleaved_lead(chunks)
        ahead, rounds = groups * workers + slack * (workers - 1 - worker), chunks * -(-m // workers) * workers
        for first in count(0, m):
            for r in range(-ahead, rounds):
                chunk, mb = interleaved_turn(r + ahead, workers, chunks)
                if r + ahead < rounds and mb < m:
                    yield chunk, Op("F", first + mb)
                chunk, mb = interleaved_turn(r, workers, chunks)
                if r >= 0 and mb < m:
                    yield chunks - 1 - chunk, Op("B", first + mb)
            for chunk in reversed(range(chunks)):
                yield chunk, Op("U", first + m - 1)


def looped_bfs(micro_batches: int) -> WorkerProgram:
    """Looped BFS: all forwards of a chunk before the next chunk's, then backwards likewise, from the last chunk back.

    Lamy-Poirier, arXiv 2211.05953. micro_batches: M, micro-batches per flush. Placed as a loop on p workers of v chunks
    each, with M ≥ p, the bubble is (p − 1)/(vM + p − 1) of a worker's time, and all M activations are kept.
    """
    #     0 │ F0a F1a F2a F3a F0b F1b F2b F3b .   .   B0b B1b B2b B3b B0a B1a B2a B3a
    #     1 │ .   F0a F1a F2a F3a F0b F1b F2b F3b B0b B1b B2b B3b B0a B1a B2a B3a .
    return _LoopedBFS(micro_batches)


@dataclass(frozen=True)
class _LoopedBFS:
    micro_batches: int

    def __call__(self, worker: int, workers: int, chunks: int) -> Iterator[tuple[int, Op]]:
        m = self.micro_batches
        for first in count(0, m):
            yield from ((chunk, Op("F", first + mb)) for chunk in range(chunks) for mb in range(m))
            yield from ((chunk, Op("B", first + mb)) for chunk in reversed(range(chunks)) for mb in range(m))
            yield from ((chunk, Op("U", first + m - 1)) for chunk in reversed(range(chunks)))
