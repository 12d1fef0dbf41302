"""PipeDream: weight stashing.

    g_t = G(w_F = w_{t−D}, w_B = w_{t−D})        w ← step(w, g)        D = slack · (S − 1 − s)
    vertical sync:  every stage uses the version that stage 0 used for the micro-batch

The backward B of a micro-batch runs on the weights that its forward F used, so the gradient is exact, but for weights
that are D updates old. Narayanan et al., SOSP 2019 (arXiv 1806.03377), sections 3.3 and 4. Left out: replicated stages.
Any optimizer. Weight copies: D + 1, one per version in flight; with vertical sync D_0 + 1 at every stage, where D_0 is
the delay of stage 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Chosen, Correction, Method, Past, State, Weights, When
from pipeback.schedules.programs import flowing
from pipeback.schedules.timeline import delays


@dataclass(repr=False)
class PipeDream(Method):
    """slack: 1 as published, 2 for PB's delays. vertical_sync: whether a micro-batch uses one version at all stages."""

    slack: int = 1
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.vertical_sync, bool):
            raise ValueError(f"pipedream: vertical_sync must be True or False, but is {self.vertical_sync!r}")
        self.schedule = flowing(self.slack)
        self.copies = "stash"
        self.needs_entry = self.vertical_sync

    def delays(self, stages: int) -> list[int]:
        counted = delays(self.schedule, stages)
        return [counted[0]] * stages if self.vertical_sync else counted

    def history(self, stage: int, stages: int) -> int:
        # so many updates ago, the micro-batch whose forward is next here entered stage 0
        return self.delays(stages)[stage] - delays(self.schedule, stages)[stage]

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        return Past(when.entry) if self.vertical_sync else weights

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used

    def correction(self, when: When, state: State) -> Correction | None:
        return Correction(used=True, entry=self.vertical_sync)
