"""ZB-H1, a zero-bubble schedule: 1F1B with a flush and a split backward.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

The backward B of a micro-batch is two operations: I, the gradient of the stage's input, for which the stage before
waits, and W, the gradient of the weights, which fills the time in which a worker of 1F1B would be idle. Qi et al.,
arXiv 2401.10241, section 2.3. It is GPipe's arithmetic in another order. Any optimizer. Weight copies: 1. A micro-batch
is held from F to W: of min(M, S) micro-batches at every stage. Bubble: (S − 1)(F + I − W), in units of time. A stage
that cannot be split does all of B in I (`pipe.unsplit` says which, and why); with a store or `vectorize=`, all do.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.split import zb_h1


@dataclass(repr=False)
class ZeroBubbleH1(Flushing):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    by_number = staticmethod(zb_h1)
    by_worker = True  # as with 1F1B
