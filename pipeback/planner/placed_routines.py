"""Placed routines: flushes of workers that hold several stages each and say themselves what comes next.

    routine      stages of worker w of p      micro-batches in flight at w      source
    looped_bfs   w, p + w, 2p + w, …          v·M, of stages                    Lamy-Poirier, arXiv 2211.05953
    zb_v         w and 2p − 1 − w             2p at most, of stages             Qi et al., arXiv 2401.10241, section 6

The order is that of `schedules.worker_programs`, which pipeback runs. v is the number of stages per worker, M that of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from pipeback.schedules.ops import Op
from pipeback.schedules.placement import WorkerProgram
from pipeback.schedules.worker_programs import looped_bfs, zb_v

PLACED = ("looped_bfs", "zb_v")


class PlacedRoutine(NamedTuple):
    """The order of one flush."""

    name: str  # one of PLACED
    workers: int
    micro_batches: int
    chunks: int  # stages per worker
    every: int = 0  # as of `Routine`: one update at the end

    @property
    def stages(self) -> int:
        return self.workers * self.chunks

    @property
    def split(self) -> bool:
        """Whether I and W are operations of their own."""
        return self.name == "zb_v"

    def in_flight(self, worker: int) -> int:
        """The micro-batches, of all stages together, between F and I or B at a worker, when it holds the most bytes."""
        if not self.split:
            return self.chunks * self.micro_batches
        return _held_in_v(self.workers, self.enough, worker)[0]

    def unfinished(self, worker: int) -> int:
        """Those between I and W at the same time."""
        return _held_in_v(self.workers, self.enough, worker)[1] if self.split else 0

    @property
    def enough(self) -> int:
        """Micro-batches after which a worker does the same with each that comes."""
        return min(self.micro_batches, 3 * self.workers + 2)

    def holder(self, stage: int) -> int:
        """The worker of a stage."""
        return holder(self.name, self.workers, stage)

    def held(self, worker: int) -> list[int]:
        """The stages of a worker, its chunks in their order."""
        return held(self.name, self.workers, self.chunks, worker)

    def program(self, worker: int) -> Iterator[tuple[int, Op]]:
        """Stage and operation, one after the other; the update of all stages names the first one."""
        p, m, stages = self.workers, self.micro_batches, self.held(worker)
        made: WorkerProgram = (zb_v if self.split else looped_bfs)(m)
        for chunk, op in made(worker, p, self.chunks):
            if op.kind == "U":
                yield worker, Op("U", m - 1)
                return
            yield stages[chunk], op


def held(order: str, workers: int, chunks: int, worker: int) -> list[int]:
    """The stages of a worker under a routine of this name."""
    if order == "zb_v" and chunks == 2:
        return [worker, 2 * workers - 1 - worker]
    return list(range(worker, workers * chunks, workers))


def holder(order: str, workers: int, stage: int) -> int:
    """The worker of a stage under a routine of this name."""
    return 2 * workers - 1 - stage if order == "zb_v" and stage >= workers else stage % workers


@lru_cache(maxsize=4096)
def _held_in_v(workers: int, micro_batches: int, worker: int) -> tuple[int, int]:
    """Micro-batches that wait for I, and for W, when most bytes are held; what waits for W alone counts a bit less."""
    flying = unfinished = 0
    most = (0.0, 0, 0)
    for _, op in PlacedRoutine("zb_v", workers, micro_batches, 2).program(worker):
        flying += (op.kind == "F") - (op.kind == "I")
        unfinished += (op.kind == "I") - (op.kind == "W")
        most = max(most, (flying + 0.9 * unfinished, flying, unfinished))
    return most[1:]
