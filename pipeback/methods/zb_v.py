"""ZB-V, a zero-bubble schedule in a V: 1F1B with a flush and a split backward, and two parts of the stages per worker.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

The backward is two operations: I, the gradient of the stage's input, and W, that of its weights. Worker w of p holds
parts w and 2p − 1 − w of the stages, so that a micro-batch turns at the last worker and comes back to the first. Qi et
al., arXiv 2401.10241, section 6. It is GPipe's arithmetic in another order. Any optimizer. Weight copies: 1. Every
worker holds as many activations as the first one of 1F1B. Bubble, from M ≥ 2p − 1 on: 0 where F, I and W take equally
long. One worker runs ZB-H1. So do several where a push ends inside a flush, on the same parts. Stages are split as
under ZB-H1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Placed, Placement
from pipeback.schedules.programs import flush
from pipeback.schedules.split import splits, zb_h1
from pipeback.schedules.worker_programs import zb_v


@dataclass(repr=False)
class ZeroBubbleV(Flushing):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    by_number = staticmethod(zb_h1)
    by_worker = True
    placement = "v"
    chunks = 2

    def placed(self, schedule: Schedule, placement: Placement) -> Placed:
        return Placed(zb_v(flush(schedule), splits(schedule)), placement)
