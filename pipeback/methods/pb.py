"""Plain pipelined backpropagation (PB).

    g_t = G(w_F = w_{t−D}, w_B = w_t)        w ← step(w, g)        D = slack · (S − 1 − s)

D is the delay of stage s in updates: when a gradient is applied, the weights w_F of its forward are D updates old. The
backward runs on the newest weights, w_B. Pétrowski et al. 1993; Kosson et al., arXiv 2003.11666, section 2.
Any optimizer. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class PipelinedBackpropagation(Method):
    """slack: 2 as published (full duplex), 1 for the delays of asynchronous 1F1B, 0 for no delay."""

    slack: int = 2

    def __post_init__(self) -> None:
        self.schedule = flowing(self.slack)
