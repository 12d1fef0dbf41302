"""The span after a tick is told by the ends of the one before, as `next_span` finds it in all stages."""

import random

import pytest

from pipeback.schedules.spans import following, next_span


@pytest.mark.parametrize("stages", [2, 3, 5, 9])
def test_the_ends_of_a_span_tell_the_next(stages):
    """Pushes of all lengths, which come when the last one has passed, or before."""
    draw, arrived, told = random.Random(stages), 2 * stages, 0
    forwards = [arrived] * stages  # all have come to the last stage
    backwards = [arrived - 2 * (stages - 1 - s) for s in range(stages)]
    for _ in range(200):
        arrived += draw.randint(1, 2 * stages)
        ticks, span = draw.choice((1, stages, 10**6)), None
        while ticks:
            came, back = [arrived, *forwards], [*backwards[1:], arrived]
            able = [s for s in range(stages) if forwards[s] < came[s] and backwards[s] < back[s]]
            if not able:
                break
            wanted = next_span(1, forwards, backwards, backwards, arrived)
            assert span is None or span == wanted
            for s in able:
                forwards[s] += 1
                backwards[s] += 1
            span = None
            if wanted is not None:
                assert list(wanted.stages) == able
                span = following(wanted._replace(ticks=1), forwards, backwards, backwards, arrived)
            told += span is not None
            ticks -= 1
    assert told > 50
