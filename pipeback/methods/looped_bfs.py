"""Looped BFS (breadth-first pipelining).

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

It is GPipe on workers that hold several parts of the stages, their chunks: worker w of p holds parts w, p + w, 2p + w
and so on. All M micro-batches go forward through a chunk before the next chunk has them, and back likewise.
Lamy-Poirier, arXiv 2211.05953, section 4. Left out: the sharding of weights. Any optimizer. Weight copies: 1. Keeps the
activations of M micro-batches. Bubble, from M ≥ p on: (p − 1)/(vM + p − 1), v chunks per worker, and v times as many
messages. One worker runs GPipe. So do several where a push ends inside a flush, on the same chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Placed, Placement
from pipeback.schedules.programs import fill_drain, flush
from pipeback.schedules.worker_programs import looped_bfs


@dataclass(repr=False)
class LoopedBFS(Flushing):
    """chunks: v, parts of the stages that each worker holds. micro_batches: M, micro-batches per flush, counted across
    pushes; None: each push is one flush.
    """

    chunks: int = 2

    by_number = staticmethod(fill_drain)
    by_worker = True
    placement = "loop"

    def placed(self, schedule: Schedule, placement: Placement) -> Placed:
        return Placed(looped_bfs(flush(schedule)), placement)
