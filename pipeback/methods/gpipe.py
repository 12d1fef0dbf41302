"""GPipe: fill and drain.

    g ← (1/M) Σ_{i<M} G(w, x_i)        w ← step(w, g)        D = 0

M micro-batches go forward, then all of them go backward, and one update follows. Huang et al., arXiv 1811.06965. Left
out: recomputation. Any optimizer. Weight copies: 1. Activations of M micro-batches. Bubble: (S − 1)/(M + S − 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import fill_drain


@dataclass(repr=False)
class GPipe(Method):
    """micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush."""

    micro_batches: int | None = None

    def __post_init__(self) -> None:
        self.schedule = fill_drain(1 if self.micro_batches is None else self.micro_batches)
        self.flush_each_push = self.micro_batches is None

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        return fill_drain(pushed) if self.micro_batches is None else self.schedule
