"""Sequential training: the reference that has no delay.

    F, B on w_t        w ← step(w, g)        D = 0 at every stage

One micro-batch passes all stages forward and backward before the next enters. Any optimizer. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class Sequential(Method):
    """Plain training, update size one micro-batch; named `sgd`, though any optimizer may step."""

    def __post_init__(self) -> None:
        self.schedule = flowing(0)
