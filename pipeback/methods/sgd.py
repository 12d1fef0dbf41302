"""Sequential training: the reference that has no delay.

    F, B on w_t        w ← step(w, g)        D = 0 at every stage

F is the forward and B the backward of a micro-batch, which passes all stages in both directions before the next one
enters. Any optimizer. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Method
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class Sequential(Method):
    """Plain training with one update per micro-batch; it is named `sgd`, but takes any optimizer."""

    def __post_init__(self) -> None:
        self.schedule = flowing(0)
