"""Interleaved 1F1B.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

It is GPipe's arithmetic in another order. Each of p workers holds v parts of the stages, its chunks: parts w, p + w,
2p + w, … Worker w runs 2(p − 1 − w) + (v − 1)p forwards ahead, then alternates; a chunk has a group of p micro-batches
before the next chunk has them. Narayanan et al., arXiv 2104.04473, section 2.2. Any optimizer. Weight copies: 1.
Bubble: (p − 1)/(vM + p − 1), that of 1F1B divided by about v; v times as many messages. One worker runs 1F1B. So do
several where a push ends inside a flush, on the same chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Placed, Placement
from pipeback.schedules.programs import flush, one_f_one_b
from pipeback.schedules.worker_programs import interleaved


@dataclass(repr=False)
class Interleaved(Flushing):
    """chunks: v, parts of the stages that each worker holds. micro_batches: M, micro-batches per flush, counted across
    pushes; None: each push is one flush.
    """

    chunks: int = 2

    by_number = staticmethod(one_f_one_b)
    by_worker = True
    placement = "loop"

    def placed(self, schedule: Schedule, placement: Placement) -> Placed:
        return Placed(interleaved(flush(schedule)), placement)
