"""A buffer that a followed forward changes between its layers, and computes with, on every runtime."""

import pytest
import torch
from torch import nn

import pipeback

from .plain_training import Model, equals_plain_training, inputs, pipeline


def counting(clones):
    """A model that divides by a count of its micro-batches."""

    def between(model, h):
        model.count.add_(1)
        return h / (model.count.clone() if clones else model.count)

    made = Model(between)
    made.register_buffer("count", torch.ones(()))
    return made


def averaging(decay=0.9):
    def between(model, h):
        with torch.no_grad():
            model.mean.mul_(decay).add_(h.mean(0), alpha=1 - decay)
        return h - model.mean

    made = Model(between)
    made.register_buffer("mean", torch.zeros(4))
    return made


@pytest.mark.parametrize(
    "options", [{}, {"activations": "recompute"}, {"activations": "host"}, {"workers": 2}], ids=str
)
@pytest.mark.parametrize("make", [lambda: counting(False), lambda: counting(True), averaging])
def test_plain_training(make, options):
    pipe = equals_plain_training(make(), inputs(6), make(), **options)
    assert pipe.model.state_dict().keys() >= {"count"} or not torch.equal(pipe.model.mean, torch.zeros(4))


class Centred(nn.Module):
    """Subtracts an average of its inputs, which it keeps, before a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, h):
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.layer(h - self.mean)


def test_a_later_stage_that_writes_into_it_is_refused():
    """The second call would write into what has come from the stage before."""

    def made():
        model = Model(lambda model, h: model.centred(model.centred(h)))
        model.centred = Centred()
        return model

    with pytest.raises(ValueError, match="'centred.mean' is written into by the forward in stage 1, and stage 0") as e:
        pipeline(made(), inputs(1)[0])
    assert "stages=pipeback.Splitting(leaves=['centred'])" in str(e.value)
    pipe = equals_plain_training(made(), inputs(6), made(), stages=pipeback.Splitting(leaves=["centred"]))
    assert not torch.equal(pipe.model.centred.mean, torch.zeros(4))


def test_a_replica_has_its_own():
    found = []
    for replicas in (None, 2):
        pipe = pipeline(counting(True), inputs(1)[0], activations="recompute", replicas=replicas)
        for x in inputs(6):
            x = x if replicas is None else torch.cat([x, x])
            pipe.push(x, torch.zeros_like(x))
        pipe.drain()
        found.append(torch.cat([p.detach().flatten() for p in pipe.model.parameters()]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"store": "host"}, {"activations": "host"}], ids=str)
def test_with_backwards_that_wait(options):
    """Autograd refuses what was changed in place meanwhile; a clone of it is the cure."""
    found = []
    for more in ({}, options):
        pipe = pipeline(counting(True), inputs(1)[0], method="pb", **more)
        for n, x in enumerate(inputs(8)):
            pipe.push(x, torch.zeros_like(x))
            if n == 4:
                pipe.load_state_dict(pipe.state_dict())
        pipe.drain()
        found.append([p.detach().clone() for p in pipe.model.parameters()])
    assert all(map(torch.equal, *found))


def test_without_the_clone():
    pipe = pipeline(counting(False), inputs(1)[0], method="pb")
    pipe.push(inputs()[0], torch.zeros(5, 4))
    pipe.push(inputs()[0], torch.zeros(5, 4))
    with pytest.raises(
        RuntimeError, match=r"was changed in place after its forward.* compute with self.count.clone\(\)"
    ):
        pipe.state_dict()
    with pytest.raises(RuntimeError, match=r"that writes into a buffer, .* computes with self.count.clone\(\)"):
        for x in inputs():
            pipe.push(x, torch.zeros_like(x))
        pipe.drain()


class Energy(nn.Module):
    """The force of an energy, differentiated by torch.func."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        return torch.func.grad(lambda each: (self.linear(each) ** 3).sum())(h)


def test_a_layer_that_differentiates_by_torch_func():
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(4, 4), Energy(), nn.Linear(4, 4))  # noqa: E731
    model = make()
    with pytest.raises(ValueError, match=r"Energy '1'.* keep it whole: stages=pipeback.Splitting\(leaves=\['1'\]\)"):
        pipeline(model, inputs()[0])  # stages="layer" looks into its children
    equals_plain_training(model, inputs(), stages=pipeback.Splitting("layer", leaves=["1"]))
    equals_plain_training(make(), inputs(), stages="auto")
    with pytest.raises(
        ValueError, match=r"stage 1 .* differentiates by torch.func, which activations='host'.*: 'device'}"
    ):
        pipeline(make(), inputs()[0], stages="auto", activations="host").push(inputs()[0], torch.zeros(5, 4))
    equals_plain_training(make(), inputs(), stages="auto", activations=["host", "device", "host"])
    whole = Model(lambda model, h: torch.func.grad(lambda each: each.tanh().sum())(h))
    with pytest.raises(ValueError, match=r"stages=pipeback.Splitting\(leaves=\[''\]\)"):
        pipeline(whole, inputs()[0])
    equals_plain_training(whole, inputs(), stages=pipeback.Splitting(leaves=[""]))
