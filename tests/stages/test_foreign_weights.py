"""A weight that a stage uses and does not have is an error, and not left untrained."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback


class Owned(nn.Linear):
    """A layer, which is not looked into, with a weight of the model that it belongs to."""

    def __init__(self, owner, cured):
        super().__init__(4, 4)
        self.owner = [owner]
        if cured:
            self.scale = owner.scale

    def forward(self, x):
        return super().forward(x) * self.owner[0].scale


class Model(nn.Module):
    def __init__(self, cured=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.last = nn.Linear(4, 4), Owned(self, cured)

    def forward(self, x):
        return self.last(self.first(x).relu())


def trained(model, **options):
    pipe = pipeback.Pipeline(
        model, loss=mse_loss, optimizer=lambda w: torch.optim.SGD(w, lr=0.1), example=torch.zeros(2, 4), **options
    )
    for n in range(6):
        pipe.push(*torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(n)))
    pipe.drain()
    return pipe


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"activations": "recompute"}], ids=str)
def test_it_is_named_with_a_cure(options):
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"stage 1 \(last\): .*weight 'scale' of the model.*self.scale = the weight"):
        trained(model, method="pb", **options)
    if "store" not in options:
        assert all(map(torch.equal, before, model.parameters()))


def test_the_cure():
    model, plain = Model(cured=True), Model(cured=True)
    trained(model, method="sgd")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for n in range(6):
        x, y = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_weights_of_another_stage():
    class Uses(nn.Linear):
        def forward(self, x):
            return x @ self.other[0].weight + super().forward(x)

    first, last = nn.Linear(4, 4), Uses(4, 4)
    last.other = [first]
    with pytest.raises(ValueError, match="stage 1 .*the weight '0.weight' of the model"):
        trained(nn.Sequential(first, last), method="pb")
