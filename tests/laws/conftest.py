"""What the laws watch while they run."""

import pytest

from pipeback.vectorized.steady import Steady


@pytest.fixture
def leapt(monkeypatch):
    """How many ticks were done so, of every run of them."""
    found, run = [], Steady.run

    def counted(self, order, ticks):
        found.append(run(self, order, ticks))
        return found[-1]

    monkeypatch.setattr(Steady, "run", counted)
    return found
