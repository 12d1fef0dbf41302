"""ZB-H2, a zero-bubble schedule: with a split backward, and enough forwards ahead to leave no bubble.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

Stage s runs 2(S − 1 − s) forwards ahead, and W, the gradient of the weights, comes 2s micro-batches after I, the
gradient of the input. Qi et al., arXiv 2401.10241, section 2.4. It is GPipe's arithmetic in another order. Any
optimizer. Weight copies: 1. A micro-batch is held from F to W: of min(M, 2S − 1) micro-batches at every stage. Bubble:
(S − 1)(F + I − 2W), in units of time, which is 0 if all three take equally long. A stage that cannot be split does all
of B in I (`pipe.unsplit` says which, and why); with a store or `vectorize=`, all do.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.flushing import Flushing
from pipeback.schedules.split import zb_h2


@dataclass(repr=False)
class ZeroBubbleH2(Flushing):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    by_number = staticmethod(zb_h2)
    by_worker = True  # as with 1F1B
