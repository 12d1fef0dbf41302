"""Worker programs: what a worker that holds several parts of the stages, its chunks, does in which order.

Each factory returns a `WorkerProgram`, which `Placed` joins with a placement. p is the number of workers, v that of
chunks per worker. The grids show two workers of the chunks a and b, and one unit of time per operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from pipeback.schedules.ops import Kind, Op, Schedule
from pipeback.schedules.placement import WorkerProgram


def as_stages(schedule: Schedule) -> WorkerProgram:
    """Each worker, which holds one part, does what it would do as one stage under this schedule."""
    #     0 │ F0 F1 .  B0 F2 B1 F3 B2 .  B3
    #     1 │ .  F0 B0 F1 B1 F2 B2 F3 B3 .
    return _AsStages(schedule)


@dataclass(frozen=True)
class _AsStages:
    schedule: Schedule

    def __call__(self, worker: int, workers: int, chunks: int) -> Iterator[tuple[int, Op]]:
        return ((0, op) for op in self.schedule(worker, workers))


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


def zb_v(micro_batches: int, split: bool = True) -> WorkerProgram:
    """ZB-V, a zero-bubble schedule placed as a V of two chunks (Qi et al., arXiv 2401.10241, section 6).

    micro_batches: M, micro-batches per flush. split: whether the backward is split into I, the gradient of the input,
    and W, that of the weights; otherwise B comes where I would. Worker w runs 2(p − w) − 1 forwards of its first chunk
    ahead; then each F of a chunk is followed by an I and a W, and the chunks alternate. At the end, I come before W.
    With F = I = W and M ≥ 2p − 1, no worker is idle between its first and its last operation, and all hold as many
    micro-batches.
    """
    # two workers, chunks a and b, three micro-batches:
    #     0 │ F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a .
    #     1 │ .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a
    return _ZeroBubbleV(micro_batches, split)


@dataclass(frozen=True)
class _ZeroBubbleV:
    micro_batches: int
    split: bool

    def __call__(self, worker: int, workers: int, chunks: int) -> Iterator[tuple[int, Op]]:
        m = self.micro_batches
        for first in count(0, m):
            for chunk, op in self._flush(worker, workers, max(m, 2 * workers - 1)):
                if op.mb < m and (self.split or op.kind != "W"):
                    yield chunk, Op("B" if op.kind == "I" and not self.split else op.kind, first + op.mb)
            yield from ((chunk, Op("U", first + m - 1)) for chunk in (1, 0))

    def _flush(self, worker: int, workers: int, m: int) -> Iterator[tuple[int, Op]]:
        """The operations on m micro-batches, 2p − 1 at least."""
        done = dict.fromkeys(((kind, chunk) for kind in "FIW" for chunk in (0, 1)), 0)

        def some(chunk: int, kinds: Sequence[Kind]) -> Iterator[tuple[int, Op]]:
            for kind in kinds:
                mb = done[kind, chunk]
                if mb < m:
                    done[kind, chunk] += 1
                    yield chunk, Op(kind, mb)

        ahead = 2 * (workers - worker) - 1
        for _ in range(ahead):
            yield from some(0, ["F"])
        for _ in range(worker):
            yield from some(1, ["F"])
            yield from some(0, ["F"])
        for _ in range(workers - worker):
            yield from some(1, ("F", "I", "W"))
        while done["F", 1] < m:
            yield from some(0, ("F", "I", "W"))
            yield from some(1, ("F", "I", "W"))
        for _ in range(worker):
            yield from some(0, ["I"])
            yield from some(1, ["I"])
        for _ in range(workers - worker):
            yield from some(0, ["I", "W"])
        for chunk in (1, 0):
            while done["W", chunk] < m:
                yield from some(chunk, ["W"])
