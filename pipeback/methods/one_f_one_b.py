"""1F1B with a flush (PipeDream-Flush).

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

It is GPipe's arithmetic in another order: backwards begin as soon as they can. Narayanan et al., arXiv 2006.09503.
Any optimizer. Weight copies: 1. Activations of min(M, S − s) micro-batches at stage s. Bubble: (S − 1)/(M + S − 1).
With a store, a flush that comes in one push runs in GPipe's order and keeps as many activations as GPipe does, so that
each stage's weights come to the device only twice per flush.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.programs import one_f_one_b


@dataclass(repr=False)
class OneForwardOneBackward(Flushing):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    by_number = staticmethod(one_f_one_b)
    by_worker = True  # else stages of one worker would run as many forwards ahead as if each had a worker of its own
