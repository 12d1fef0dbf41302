"""Weights that are given other memory, as by `p.data = ...`, train as in a plain loop, or that is refused."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import pipeback

DOUBLE = torch.float64


class Rebinding(torch.optim.Optimizer):
    """SGD which gives each weight other memory."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.data


def rebind(optimizer, args=(), kwargs=None):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = 0.9 * p.data


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(DOUBLE)


def build(net, optimizer=Rebinding, **options):
    return pipeback.Pipeline(net, loss=nn.functional.mse_loss, optimizer=optimizer, **{"method": "sgd", **options})


def batches(count=3):
    torch.manual_seed(2)
    return [(torch.randn(4, 4, dtype=DOUBLE), torch.randn(4, 4, dtype=DOUBLE)) for _ in range(count)]


def train_alike(pipe, plain, optimizer):
    for x, y in batches():
        pipe.push(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    with pipe.shown():
        assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    "options",
    [{}, {"vectorize": True, "method": "gpipe"}, {"store": "host"}, {"workers": 2, "method": "gpipe"}],
    ids=str,
)
def test_an_optimizer_that_rebinds_trains_as_in_a_plain_loop(options):
    net = model()
    plain = deepcopy(net)
    pipe, optimizer = build(net, **options), Rebinding(plain.parameters())
    train_alike(pipe, plain, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_rebinds_is_followed(kind, when):
    net = model()
    plain = deepcopy(net)
    pipe, optimizer = build(net, lambda params: kind(params, lr=0.01)), kind(plain.parameters(), lr=0.01)
    for one in (*pipe.optimizers, optimizer):
        getattr(one, f"register_step_{when}_hook")(rebind)
    train_alike(pipe, plain, optimizer)


@pytest.mark.parametrize("options", [{}, {"store": "host"}, {"vectorize": True, "method": "gpipe"}], ids=str)
@pytest.mark.parametrize("whose", ["model", "optimizers"])
def test_what_is_rebound_within_shown_is_kept(options, whose):
    net = model()
    pipe = build(net, lambda params: torch.optim.SGD(params, lr=0.1), **options)
    (x, y), *_ = batches()
    pipe.push(x, y)
    pipe.drain()
    with pipe.shown(changes=True):
        before = [p.clone() for p in net.parameters()]
        for optimizer in [torch.optim.SGD(net.parameters(), lr=0.1)] if whose == "model" else pipe.optimizers:
            rebind(optimizer)
    with pipe.shown():
        assert all(torch.equal(p, 0.9 * old) for p, old in zip(net.parameters(), before, strict=True))
        loss = nn.functional.mse_loss(net(x), y)
    torch.testing.assert_close(pipe.push(x, y), loss.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"store": "host"}], ids=str)
def test_rebinding_between_pushes_by_an_optimizer_is_refused(options):
    pipe = build(model(), lambda params: torch.optim.SGD(params, lr=0.1), **options)
    (x, y), *_ = batches()
    pipe.push(x, y)
    rebind(pipe.optimizers[1])
    with pytest.raises(RuntimeError, match=r"stage 1 \(1\): (weight|bias) was moved or cast in its optimizer; copy"):
        pipe.push(x, y)
