"""Stages onto workers: the optimum over contiguous groups, against trying them all."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeback.splitting.partition import balance, split
from tests.laws.cases import data, pipeline


@settings(max_examples=80)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 8))
def test_balance_is_the_optimum(times, workers):
    n = len(times)
    if workers > n:
        with pytest.raises(ValueError, match=f"between 1 and the number of stages, {n}, but is {workers}"):
            balance(times, workers)
        return
    owner = balance(times, workers)
    assert owner == sorted(owner) and set(owner) == set(range(workers))
    slowest = max(sum(t for t, w in zip(times, owner, strict=True) if w == k) for k in range(workers))
    best = min(
        max(sum(times[a:b]) for a, b in zip((0, *cuts), (*cuts, n), strict=True))
        for cuts in combinations(range(1, n), workers - 1)
    )
    assert slowest == pytest.approx(best)


def test_every_child_is_a_stage_also_one_that_stands_twice():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [(part.name, part.module) for part in split(model)] == [(str(n), m) for n, m in enumerate(model)]
    assert [part.name for part in split([nn.Linear(2, 2), nn.Tanh()])] == ["0", "1"]


def test_workers_are_grouped_by_measured_time():
    """One stage as long as all others together has a worker of its own."""

    class Heavy(nn.Linear):
        def forward(self, x):
            for _ in range(2000):  # so long that a busy machine does not hide it
                x = torch.tanh(x)
            return super().forward(x)

    pipe = pipeline([Heavy(6, 6), *(nn.Linear(6, 6) for _ in range(5))], "pb", workers=2)
    pipe.push(*data(1)[0])
    assert pipe.owner == [0, 1, 1, 1, 1, 1]
    pipe.close()
