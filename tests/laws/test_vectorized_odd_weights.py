"""Weights of unusual forms: where stages run as one, they are trained as by the loop."""

import pytest
import torch
from torch import nn

import pipeback
from pipeback.optim import RotatedAdamW


class Gap(nn.Module):
    """Its weight is every second column of a tensor, whose other columns it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.randn(6, 12, dtype=torch.float64)
        self.weight = nn.Parameter(self.whole[:, ::2])

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Gate(nn.Module):
    """Its weight has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Parameter(torch.tensor(0.7)), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.gate * torch.tanh(self.layer(x))


class Empty(nn.Module):
    """Its weight has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.layer = nn.Parameter(torch.zeros(0, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) + self.nothing.sum(0)


def adam(weights):
    return torch.optim.Adam(weights, lr=0.01)


def momentum(weights):
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


def layer():
    return nn.Linear(6, 6)


def trained(block, optimizer, method, first=None, **options):
    """The losses, and the model with its weights. first: makes all stages but the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[(first or block)() for _ in range(4)], block()).double()
    x = torch.randn(18, 6, dtype=torch.float64)
    with pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=optimizer, method=method, micro_batch_size=1, **options
    ) as pipe:
        losses = [pipe.push(batch, batch.flip(1)).item() for batch in x.split(3)]
        pipe.drain()
    return losses, model


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_weights_whose_memory_has_gaps(optimizer):
    """The last stage is no row of others, so that it keeps the memory of its weight."""
    losses, model = trained(Gap, optimizer, "pb")
    found, as_one = trained(Gap, optimizer, "pb", vectorize=True)
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
    for a, b in zip(as_one, model, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-12, atol=1e-12)
        assert torch.equal(a.whole[:, 1::2], b.whole[:, 1::2])


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [
        (adam, "pipeoptim"),
        (adam, "msnag"),
        (adam, "sc"),
        (adam, pipeback.methods.create("lwp", form="weight")),
        (momentum, "cerebras"),
        (momentum, "spectrain"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.01}, {"first": layer}])
def test_weights_without_dimensions(optimizer, method, options):
    losses, model = trained(Gate, optimizer, method, **options)
    found, as_one = trained(Gate, optimizer, method, vectorize=True, **options)
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
    for a, b in zip(as_one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"vectorize": True}])
def test_weights_without_elements_have_no_basis(options):
    losses, _ = trained(Empty, adam, "eigendelay", **options)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))


def test_rotated_adamw_steps_weights_without_elements_beside_others():
    torch.manual_seed(0)
    weight, nothing = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), nn.Parameter(torch.zeros(0, 4).double())
    optimizer = RotatedAdamW([weight, nothing], lr=0.1)
    before = weight.detach().clone()
    (weight.square().sum() + nothing.sum()).backward()
    optimizer.step()
    assert bool(torch.isfinite(weight).all()) and not torch.equal(weight, before)
