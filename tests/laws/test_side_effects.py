"""Forwards and losses that do more than compute train the same, whether stages run as one (`vectorize=`) or one by one;
and what is tried before the first micro-batch does not count.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import pipeback
from tests.laws.as_one import model, same


class Block(nn.Module):
    """What of a number changes at every call, what is drawn by Python, what is computed again in the backward."""

    def __init__(self, does):
        super().__init__()
        self.layers, self.does = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), does
        self.tau, self._tau, self.taus, self.size = 1.0, 1.0, (1.0,), None

    def forward(self, x):
        scale: float = getattr(self, self.does)()
        if self.does == "checkpoints":
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + scale * self.layers(x)

    def plain(self):
        return 1.0

    checkpoints = plain

    def first_call(self):
        self.size = 1.0
        return self.size

    def anneals(self):
        self.tau *= 0.95
        return self.tau

    def anneals_privately(self):
        self._tau *= 0.95
        return self._tau

    def anneals_in_a_tuple(self):
        self.taus = (0.95 * self.taus[0],)
        return self.taus[0]

    def pythons(self):
        return 0.0 if random.random() < 0.1 else 1.0

    def numpys(self):
        return 0.0 if np.random.rand() < 0.1 else 1.0  # noqa: NPY002


def trained(does, method="pb", loss=mse_loss, classes=False, pushes=4, **options):
    """Losses, weights, numbers of the modules, and what is told of the stages."""
    built = model(make=lambda: Block(does))
    pipe = pipeback.Pipeline(
        built, loss=loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), method=method,
        micro_batch_size=2, **options,
    )  # fmt: skip
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    numbers = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(pushes):
        x = torch.randn(6, 6, generator=numbers, dtype=torch.float64)
        y = torch.randint(1, 5, (6,), generator=numbers) if classes else torch.ones(6, 6, dtype=torch.float64)
        losses.append(pipe.push(x, y).double())
    pipe.drain()
    weights = torch.cat([p.detach().flatten() for p in built.parameters()])
    state = torch.tensor([[block.tau, block._tau, block.taus[0]] for block in built[1:-1]])
    return [torch.stack(losses), weights, state], pipe.vectorized.get("stages 1 … 5")


@pytest.mark.filterwarnings("ignore:an attribute of a module was set")
@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("plain", "as one"),
        ("first_call", "as one"),
        ("checkpoints", "decides what is kept for the backward"),
        ("anneals", "changes attributes of its module"),
        ("anneals_privately", "changes attributes of its module"),
        ("anneals_in_a_tuple", "changes attributes of its module"),
    ],
)
def test_forwards_with_side_effects(does, told):
    wanted, _ = trained(does)
    found, reason = trained(does, vectorize="auto")
    same(found, wanted)
    assert told in reason


@pytest.mark.parametrize("does", ["pythons", "numpys"])
def test_forwards_that_draw_outside_of_torch(does):
    """Which micro-batch gets which number is another matter where stages take turns otherwise."""

    def drawn(**options):
        _, told = trained(does, **options)
        return [random.getstate(), *map(str, np.random.get_state())], told  # noqa: NPY002

    wanted, _ = drawn()
    found, told = drawn(vectorize="auto")
    assert found == wanted
    assert "random numbers of Python or numpy" in told


def counted(output, target):
    target -= 1
    return (cross_entropy if target.dim() == 1 else mse_loss)(output, target)


def without(output, target):
    return (cross_entropy if target.dim() == 1 else mse_loss)(output, target - 1)


@pytest.mark.parametrize("classes", [True, False], ids=["classes", "numbers"])
@pytest.mark.parametrize("method", ["pb", "gpipe"])
@pytest.mark.parametrize("vectorize", [False, "auto"], ids=["one by one", "as one"])
def test_losses_that_write_into_their_target(vectorize, method, classes):
    wanted, _ = trained("plain", method, without, classes)
    found, _ = trained("plain", method, counted, classes, vectorize=vectorize)
    same(found, wanted)
