"""PipeDream-2BW: double-buffered weights.

    W^(t+1) = W^(t) − η ∇f(W^(t−1))        micro-batch i (from 0): F and B on version max(⌊i/m⌋ − 1, 0)

F is the forward, B the backward. Every m ≥ S micro-batches are a group, which makes one new version, and every stage
has a delay of one group. Narayanan et al., arXiv 2006.09503, section 3.1. Left out: recomputation. Any optimizer.
Weight copies: 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeback.methods.base import Chosen, Method, Past, State, Weights, When
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class PipeDream2BW(Method):
    """micro_batches: m, micro-batches per group, at least slack · (S − 1) + 1. slack: 1 as published."""

    micro_batches: int
    slack: int = 1

    def __post_init__(self) -> None:
        self.schedule = flowing(self.slack, every=self.micro_batches)
        self.copies = "stash"
        self.fixed_groups = True

    @classmethod
    def derived(cls, stages: int, updates: int) -> dict[str, Any]:
        """micro_batches: as few as two versions allow."""
        return {"micro_batches": cls.slack * (stages - 1) + 1}

    def check_stages(self, stages: int) -> None:
        least = self.slack * (stages - 1) + 1
        if self.micro_batches < least:
            raise ValueError(
                f"pipedream_2bw: micro_batches={self.micro_batches} is too few for {stages} stages; "
                f"two versions suffice from {least}; use that or more, or pipedream, which keeps every version"
            )

    def delays(self, stages: int) -> list[int]:
        # the programs would count less at the last stage, which uses the same version as the others
        return [1] * stages

    def history(self, stage: int, stages: int) -> int:
        return 1

    def held(self, stage: int, stages: int) -> int:
        return 2

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        group = (when.mb - when.start) // self.micro_batches
        return Past(when.base + max(group - 1, 0))

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used
