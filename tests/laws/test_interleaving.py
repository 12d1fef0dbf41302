"""Law: any interleaving that respects data flow gives the same weights, bit for bit."""

from itertools import product

import pytest
import torch

import pipeback
from tests.helpers.choice import mostly_rare
from tests.laws.cases import CASES, FEW, STAGES, data, everything, network, pipeline


@pytest.mark.parametrize(
    ("case", "activations"),
    mostly_rare(
        product(CASES, ("device", "recompute")),
        *((case, ("device", "recompute")[n % 2]) for n, case in enumerate(FEW)),
    ),
)
def test_any_order_gives_the_same_bits(case, activations):
    batches = data(23)

    def run(order, seed=0):
        pipe = pipeline(
            network(), CASES[case](STAGES), debug=pipeback.Debug(order=order, seed=seed), activations=activations
        )
        losses = [pipe.push(x, y) for x, y in batches]
        flying = everything(pipe)
        pipe.drain()
        return torch.stack(losses), flying, everything(pipe)

    expected = run("grouped")
    for order, seed in (("upstream", 0), ("sticky", 0), ("random", 0), ("random", 1)):
        for found, wanted in zip(run(order, seed), expected, strict=True):
            assert torch.equal(found, wanted), f"{order} differs from grouped"
