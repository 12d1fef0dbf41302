"""The recurrences of chains: one class before the other, as one method is around the other."""

from __future__ import annotations

from collections.abc import Sequence

from tests.laws.reference import Options, Tensors
from tests.laws.reference_later import (
    Braking,
    DecayedPrediction,
    DelayCompensation,
    ErrorFeedback,
    OptimizerPrediction,
    StalenessRates,
)
from tests.laws.reference_methods import Corrected


class CompensatedPrediction(DelayCompensation, OptimizerPrediction):
    """dc_asgd around pipeoptim: the gap is that of the prediction, and its direction that of the carried gradient."""


class SlowPrediction(StalenessRates, DecayedPrediction):
    """staleness_lr around msnag: the steps ahead are at the rates of the stage."""


class SlowVelocity(StalenessRates, Corrected):
    """staleness_lr around lwp: so is the prediction."""

    def forward_weights(self, s: int, u: int, options: Sequence[Options]) -> Tensors:
        divided = [{**o, "lr": o["lr"] * self.scale / (1 + self.delay(s)) ** self.power} for o in options]
        return super().forward_weights(s, u, divided)


class BrakedSpike(Braking, Corrected):
    """braking around sc: the spike is of the braked gradient."""


class FedBackRates(ErrorFeedback, StalenessRates):
    """ef around staleness_lr: what is fed back are updates at the rates of the stage."""
