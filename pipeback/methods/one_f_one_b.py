"""1F1B with a flush (PipeDream-Flush).

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

It is GPipe's arithmetic in another order: backwards begin as soon as they can. Narayanan et al., arXiv 2006.09503.
Any optimizer. Weight copies: 1. Activations of min(M, S − s) micro-batches at stage s. Bubble: (S − 1)/(M + S − 1).
With a store, a flush that comes in one push runs in GPipe's order and keeps as many activations as GPipe does, so that
each stage's weights come to the device only twice per flush.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import one_f_one_b


@dataclass(repr=False)
class OneForwardOneBackward(Method):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    micro_batches: int | None = None
    by_worker = True  # else stages of one worker would run as many forwards ahead as if each had a worker of its own

    def __post_init__(self) -> None:
        self.schedule = one_f_one_b(1 if self.micro_batches is None else self.micro_batches)
        self.flush_each_push = self.micro_batches is None

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        return one_f_one_b(pushed) if self.micro_batches is None else self.schedule
