"""What the laws watch while they run."""

import pytest

from pipeback.vectorized.flushes.whole_flush import WholeFlush
from pipeback.vectorized.ticks.steady import Steady


class Leapt(list):
    """How many ticks were done as one, of every run of them; `some`: those of only some of the stages in turn."""

    some = 0


@pytest.fixture
def leapt(monkeypatch):
    found, run = Leapt(), Steady.run

    def counted(self, order, span):
        found.append(run(self, order, span))
        in_turn = range(span.stages.start % span.stages.step, self.worker.count, span.stages.step)
        if len(span.stages) < len(in_turn):
            found.some += found[-1]
        return found[-1]

    monkeypatch.setattr(Steady, "run", counted)
    return found


@pytest.fixture
def flushed(monkeypatch):
    """The micro-batches of every flush that was done as a whole."""
    found, end = [], WholeFlush.end

    def counted(self):
        count = len(self._begun.mbs)
        end(self)
        found.append(count)

    monkeypatch.setattr(WholeFlush, "end", counted)
    return found


@pytest.fixture
def turned(monkeypatch):
    """How many micro-batches went through all stages one by one, of every run of them."""
    found, run = [], Steady.run_in_turn

    def counted(self, order, span):
        found.append(run(self, order, span))
        return found[-1]

    monkeypatch.setattr(Steady, "run_in_turn", counted)
    return found
