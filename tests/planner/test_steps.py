"""Steps: a pipeline that is never drained takes as long per micro-batch as its slowest worker does."""

import pytest

from pipeback.planner.steps import flowing
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.techniques import technique


@pytest.mark.parametrize("slower", [0.5, 1e-3, 1e-5, 1e-8, 0, -1e-8, -1e-5, -1e-3, -0.5])
@pytest.mark.parametrize("workers", [2, 5])
def test_the_slowest_worker_counts(workers, slower):
    """Also where workers are so alike that a queue before the slowest fills for longer than anybody looks."""
    seconds = [1 + slower * w / workers for w in range(workers)]
    times = [StageTimes(one / 4, one / 2, 0, one / 4, 1e-3, 1e-3) for one in seconds]
    found = flowing(technique("pb").routine(workers, 1), tuple(times))
    assert max(seconds) * (1 - 1e-9) <= found <= max(seconds) * (1 + 1e-4)
