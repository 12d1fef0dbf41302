"""Spread experts: the router runs on other weights for a moment, at which no other thread looks."""

import threading

import torch
from torch import nn

from pipeback.stages.tracing_lock import TRACING
from pipeback.tensor_parallel.experts import summed
from pipeback.tensor_parallel.group import TensorGroup


class Router(nn.Module):
    """Notes whether its weights are those that it was built with, and whether another thread may look at them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.built, self.seen = id(self.weight), []

    def forward(self, x):
        looks = threading.Thread(target=lambda: self.seen.append(TRACING.acquire(blocking=False)))
        looks.start()
        looks.join()
        self.seen.append(id(self.weight) == self.built)
        return x @ self.weight


def test_nobody_looks_at_weights_that_stand_in():
    router, group = Router(), TensorGroup(0, 2)  # graphs know it by its number
    found = summed(router, torch.ones(2, 3), group)
    assert router.seen == [False, False] and id(router.weight) == router.built
    found.sum().backward()
    assert torch.equal(router.weight.grad, torch.full((3, 3), 2.0))
