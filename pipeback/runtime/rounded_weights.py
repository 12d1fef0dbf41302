"""Rounded weights: half-precision weights on the device are rounded from float32 masters beside them. masters=True.

    F, B   on round(w̃), w̃ = the method's weights from the masters w        U   w ← step(w, g),  then round(w)

F is the forward, B the backward and U the update. As in `ResidentWeights`, the weights that the method chooses are
written to the masters' memory; then the half weights, which graphs refer to, are rounded from it. Between operations
they are the newest masters, rounded to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeback.runtime.weight_provider import Held, ResidentWeights
from pipeback.schedules.order import Ops
from pipeback.stages.gradients import GradientSums
from pipeback.stages.stage import Stage

_Some = TypeVar("_Some", bound=Sequence[Held])


class RoundedWeights(ResidentWeights):
    """`ResidentWeights` whose masters are rounded to the weights that F and B run on."""

    def forward(self, ops: Ops) -> list[Held]:
        return _rounded(super().forward(ops))

    def after_forward(self, held: Sequence[Held], ops: Ops) -> None:
        super().after_forward(held, ops)
        _rounded(held)

    def backward(self, ops: Ops) -> tuple[list[Held], dict[int, int]]:
        held, versions = super().backward(ops)
        _rounded(held)
        return held, versions

    def after_backward(self, held: Sequence[Held]) -> None:
        super().after_backward(held)
        _rounded(held)

    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None:
        super().update(stages, make)
        for stage in stages:
            stage.masters.round()


def _rounded(held: _Some) -> _Some:
    for h in held:
        for stage in h.team.stages:
            stage.masters.round()
    return held
