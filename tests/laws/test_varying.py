"""Law: stages that run as one follow corrections that change with every update."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import pipeback
from pipeback import methods
from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.momentum import velocity
from pipeback.schedules.programs import flowing
from tests.helpers.choice import mostly_rare
from tests.laws.as_one import pipelines, pushed, same


class Growing(Method):
    """F on w − (1 − 0.9^max(n − late, 0))·η·T·v after n updates; T is D, or `horizon` at every stage.

    rates: whether its correction says the rates. own: whether it says that its update is called with rows.
    """

    def __init__(
        self, rates: bool = False, horizon: float | None = None, late: int = 0, *, own: bool = False, every: int = 1
    ) -> None:
        self.schedule, self.copies, self.takes_rows = flowing(2, every=every), "scratch", own
        self.rates, self.horizon, self.late, self.own = rates, horizon, late, own

    def init(self, weights: Weights) -> State:
        return {"velocity": [None] * len(weights), "updates": 0}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        return Shift(weights, self._ahead(when, state), state["velocity"])

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        optimizer.step()
        return {"velocity": velocity(optimizer, weights), "updates": state["updates"] + 1}

    def advanced(self, state: State, updates: int) -> State:
        return {**state, "updates": state["updates"] + updates}

    def correction(self, when: When, state: State) -> Correction:
        rates = when.rates if self.rates else ()
        return Correction(self._ahead(when, state), rates=rates, varies=True, own=self.own)

    def _ahead(self, when: When, state: State) -> Sequence[float]:
        grown = 1 - 0.9 ** max(state.get("updates", 0) - self.late, 0)
        horizons = when.delays if self.horizon is None else [self.horizon] * len(when.delays)
        return [-grown * rate * T for rate, T in zip(when.rates, horizons, strict=True)]


INNER = {
    "lwp": [("lwp", {})],
    "cerebras": [("cerebras", {})],
    "spectrain": [("spectrain", {"slack": 2})],
    "spectrain-v2": [("spectrain", {"slack": 2, "version": 2})],
}


@pytest.mark.parametrize("name", mostly_rare(INNER, "lwp", "spectrain"))
def test_predictions_at_rates_that_pipemare_anneals(name: str, leapt: list[int]) -> None:
    inner = [methods.create(one, **options) for one, options in INNER[name]]
    one, other = pipelines(pipeback.chain(methods.create("pipemare", anneal=21, t2=False), *inner), "momentum")
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30


OWN = {
    "no rates": Growing(),
    "rates": Growing(rates=True),
    "an update with rows": Growing(own=True),
    "updates of two micro-batches": Growing(every=2),
    "the last stage": Growing(horizon=2.0),
    "the last stage, later": Growing(horizon=2.0, late=23),  # no graph of its F and B together goes on
}


@pytest.mark.parametrize("which", OWN)
def test_an_own_correction_that_varies(which: str, leapt: list[int]) -> None:
    one, other = pipelines(OWN[which], "momentum")
    same(pushed(other), pushed(one))
    assert sum(leapt) > 30
