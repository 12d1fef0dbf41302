"""Plain pipelined backpropagation (PB).

    g_t = G(w_F = w_{t−D}, w_B = w_t)        w ← step(w, g)        D = slack · (S − 1 − s)

D is the delay of stage s in updates: when a gradient is applied, the weights w_F of its forward are D updates old. The
backward runs on the newest weights, w_B. Pétrowski et al. 1993; Kosson et al., arXiv 2003.11666, section 2.
Any optimizer. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.placement import Kind
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class PipelinedBackpropagation(Method):
    """slack: 2 as published (full duplex), 1 for the delays of asynchronous 1F1B, 0 for no delay.

    placement: "v" puts two parts of the stages on each of p workers, w and 2p − 1 − w. Early stages keep many
    activations and late ones few, so all workers keep as many. Delays and bits are the same.
    """

    slack: int = 2
    placement: Kind = "neighbours"

    def __post_init__(self) -> None:
        if self.placement not in ("neighbours", "v"):
            raise ValueError(f"pb: placement must be 'neighbours' or 'v', not {self.placement!r}")
        self.chunks = 2 if self.placement == "v" else 1
        self.schedule = flowing(self.slack)
