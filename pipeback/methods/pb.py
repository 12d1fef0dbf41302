"""Plain pipelined backpropagation (PB).

    g_t = G(w_F = w_{t−D}, w_B = w_{t−late})        w ← step(w, g)        D = slack · (S − 1 − s) + late

D is the delay of stage s in updates: when a gradient is applied, the weights w_F of its forward are D updates old. The
backward runs on the newest weights, w_B; `late` is 0 unless it is asked for. Pétrowski et al. 1993; Kosson et al.,
arXiv 2003.11666, section 2.
Any optimizer. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.placement import Kind
from pipeback.schedules.programs import flowing, positive
from pipeback.schedules.split import late


@dataclass(repr=False)
class PipelinedBackpropagation(Method):
    """slack: 2 as published (full duplex), 1 for the delays of asynchronous 1F1B, 0 for no delay.

    placement: "v" puts two parts of the stages on each of p workers, w and 2p − 1 − w. Early stages keep many
    activations and late ones few, so all workers keep about the same number. Delays and bits are the same.
    late: micro-batches by which W, the gradient of a stage's weights, and its update come after I, the gradient of its
    input. I is sent to the stage before at once; W, the update and sums over replicas take the time that is left. D and
    the activations that are held grow by `late`, and B runs on weights that are `late` updates older than those
    that U moves.
    """

    slack: int = 2
    placement: Kind = "neighbours"
    late: int = 0

    def __post_init__(self) -> None:
        if self.placement not in ("neighbours", "v"):
            raise ValueError(f"pb: placement must be 'neighbours' or 'v', not {self.placement!r}")
        self.chunks = 2 if self.placement == "v" else 1
        late_by = positive("late", self.late, least=0)
        self.schedule = late(self.slack, late_by) if late_by else flowing(self.slack)
