"""Staleness-aware learning rates.

    w ← step(w, g)  at the rate η_s = κ·η / (1 + D)^p        κ = 1, p = 1

D is the stage's delay in updates. The rate is divided for good; the first technique of PipeMare (`pipemare`, T1)
divides it alike at first, and then lets it return to η. The forward F and the backward B run on w_t.

Zhang et al., IJCAI 2016 (arXiv 1511.05950), section 3, whose staleness is counted from 1; p and κ are ours. Any
optimizer; a decoupled weight decay, which the rate multiplies, becomes smaller, too. Weight copies: 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeback.methods.base import Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.columns import Number
from pipeback.methods.option_checks import check_number
from pipeback.methods.rates import divided_rates
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class StalenessRates(Method):
    """power: p. scale: κ, which multiplies the rate of every stage. slack: 2 for PB's delays."""

    power: float = 1.0
    scale: float = 1.0
    slack: int = 2

    def __post_init__(self) -> None:
        check_number("staleness_lr", "power", self.power)
        check_number("staleness_lr", "scale", self.scale, above=True)
        self.schedule = flowing(self.slack)
        self.takes_rows = True

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        with divided_rates(optimizer, self._divisor(when.delay)):
            optimizer.step()
        return state

    def update_rates(self, when: When, state: State) -> list[float]:
        return [rate / self._divisor(D) for rate, D in zip(when.rates, when.delays, strict=True)]

    def correction(self, when: When, state: State) -> Correction:
        return Correction(rates=self.update_rates(when, state))

    def _divisor(self, delay: Number) -> Number:
        return (1 + delay) ** self.power / self.scale
