"""GPipe: fill and drain.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

M micro-batches go forward, then all of them go backward, and one update follows. Huang et al., arXiv 1811.06965. Left
out: recomputation. Any optimizer. Weight copies: 1. Activations of M micro-batches. Bubble: (S − 1)/(M + S − 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.programs import fill_drain


@dataclass(repr=False)
class GPipe(Flushing):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    by_number = staticmethod(fill_drain)
    by_worker = True
