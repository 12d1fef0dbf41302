"""Crossover: gain and price against their closed forms."""

from math import sqrt

import pytest

from pipeback.planner import Loss
from pipeback.planner.crossover import crossings, first
from pipeback.planner.loss import effective_delay
from pipeback.planner.techniques import technique

FLUSHING, FLOWING = technique("gpipe"), technique("pipedream")


@pytest.mark.parametrize("micro_batches", [1, 7, 96])
def test_the_gain_is_that_of_a_drained_pipeline(micro_batches):
    for one in crossings(FLUSHING, FLOWING, micro_batches, Loss(slow={"pipedream": 0.1})):
        assert one.gain == pytest.approx((micro_batches + one.stages - 1) / micro_batches)


def test_the_price_is_that_of_the_effective_delay():
    for one in crossings(FLUSHING, FLOWING, 8, Loss(slow={"pipedream": 0.1})):
        S = one.stages
        assert effective_delay(FLOWING.delays(S)) == pytest.approx(sqrt((S - 1) * (2 * S - 1) / 6))
        assert one.slow == pytest.approx(1 + 0.1 * sqrt((S - 1) * (2 * S - 1) / 6))


def test_flowing_wins_from_the_first_stage_count_whose_gain_is_larger():
    """(S − 1)/M against κ·sqrt((S − 1)(2S − 1)/6): equal at (S − 1)/(2S − 1) = κ²M²/6."""
    M, S = 8, 12
    equal = sqrt((S - 1) / (2 * S - 1) * 6) / M
    for kappa, wins in ((equal * 0.999, True), (equal * 1.001, False)):
        found = crossings(FLUSHING, FLOWING, M, Loss(slow={"pipedream": kappa}), stages=(S,))
        assert (first(found) == S) is wins
    free = crossings(FLUSHING, FLOWING, M, Loss(slow={"pipedream": 0.0}))
    assert first(free) == 2
    assert first(crossings(FLUSHING, FLOWING, M, Loss(slow={"pipedream": 1.0}))) is None


def test_larger_updates_cost_a_flush_more():
    loss = Loss(critical_batch=1e6, slow={"pipedream": 0.1})
    plain = crossings(FLUSHING, FLOWING, 8, loss)
    sized = crossings(FLUSHING, FLOWING, 8, loss, tokens=1e5)
    for one, two in zip(plain, sized, strict=True):
        assert two.gain / one.gain == pytest.approx((1 + 0.8) / (1 + 0.1)) and one.slow == two.slow
