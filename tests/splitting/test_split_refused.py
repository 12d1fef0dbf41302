"""Models and cuts that cannot be split, and what stays whole."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from tests.splitting.models import Deep, X, linear, pipe, sgd


class Model(nn.Module):
    """Two layers around what a test does between them."""

    def __init__(self, between=None):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.between = (between or (lambda own, x: x),)

    def forward(self, x):
        return self.b(self.between[0](self, self.a(x)))


def refused(message, model, x=X, error=ValueError, **options):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        pipe(model, x, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tripled(torch.autograd.Function):
    """Its gradient is not what its forward says."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Thing:
    def __init__(self, held):
        self.held = held


def test_forwards_that_cannot_be_followed():
    def count(own, x):
        own.calls = getattr(own, "calls", 0) + 1
        return x

    def keep(own, x):
        x, own.last = x + getattr(own, "last", 0), x
        return x

    refused(r"Model changes self.calls in its forward.*leaves=", Model(count))
    refused(r"Model changes self.last in its forward", Model(keep))
    refused(r"Model.forward calls Tensor.numpy", Model(lambda own, x: x + torch.from_numpy(x.detach().numpy())))

    class Handing(Model):
        def forward(self, x):
            return self.b(self.c(self.a(x), Thing(threading.Lock())))

        def c(self, x, thing):
            return self.d(x, thing)

    handing = Handing()
    handing.d = type("Keeper", (nn.Module,), {"forward": lambda self, x, thing: x})()
    refused(r"Handing.forward gives Keeper 'd' an object of lock, which every micro-batch would share", handing)


def test_custom_autograd_functions_keep_their_backward():
    plain = Model(lambda own, x: Tripled.apply(x))
    found = pipe(copy.deepcopy(plain), stages="layer")
    for _ in range(3):
        wanted = mse_loss(plain(X), X)
        plain.zero_grad()
        wanted.backward()
        sgd(plain.parameters()).step()
        assert torch.equal(found.push(X, X), wanted.detach())


def test_what_cannot_be_followed_can_stay_whole():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = linear(), 0

        def forward(self, x):
            self.calls += 1
            return Tripled.apply(self.inner(x))

    model = nn.Sequential(linear(), Odd(), linear())
    refused("Odd '1' changes self.calls.*leaves=", model, stages="layer")
    assert pipe(model, stages=pipeback.Splitting("layer", leaves=["1"])).stages == 3


def test_decisions_by_values():
    found = pipe(Model(lambda own, x: torch.relu(x) if x.sum() > -1e9 else x), stages="layer")
    found.push(X, X)
    fickle = Model(lambda own, x: torch.relu(x) if x.sum() > 0 else x)
    fickle.a = nn.Identity()
    found = pipe(fickle, X.abs(), stages="layer")
    found.push(X.abs(), X)
    wrong = r"Model.forward takes another branch for this micro-batch: __bool__ gave False, but True.*leaves="
    with pytest.raises(Exception, match=wrong):
        found.push(-X.abs(), X)


def test_structures_that_change():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.more = linear(), False

        def forward(self, x):
            return {"x": self.inner(x), **({"more": x} if self.more else {})}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.two, self.head = Two(), linear()

        def forward(self, x):
            return self.head(self.two(x)["x"])

    model = Whole()
    found = pipe(model, stages=pipeback.Splitting("layer", leaves=["two"]))
    found.push(X, X)
    model.two.more = True
    with pytest.raises(Exception, match=r"Two 'two' gave another structure than when the model was traced"):
        found.push(X, X)
    found = pipe(Model(), stages="layer")
    found.push({"x": X}, X)  # by keyword instead of position: followed once more


def test_cuts_that_do_not_fit():
    refused("stages=9, but the model has 8 layers", Deep(), stages=9)
    refused(r"Deep has no module 'blocs.1'; did you mean 'blocks.1'", Deep(), stages=["blocs.1"])
    refused(r"'blocks' is not called by itself|has no module", nn.Sequential(Deep()), stages=["blocks"])
    refused("stages must be one of auto, block, layer.*did you mean", Deep(), stages="blocks")
    refused("at least 1", Deep(), stages=0)
    refused("repeats no block.*layer", Model(), stages="block")
    refused("leaves: Deep has no module 'nowhere'", Deep(), stages=pipeback.Splitting(leaves=["nowhere"]))
    refused("balance must be", Deep(), stages=pipeback.Splitting(2, balance="weight"))
    with pytest.raises(TypeError, match="Deep: Deep has a forward of its own.*needs an input: give example="):
        pipeback.Pipeline(Deep(), loss=mse_loss, optimizer=sgd)
    with pytest.raises(ValueError, match="a list has its modules for stages"):
        pipeback.Pipeline([linear(), linear()], loss=mse_loss, optimizer=sgd, stages="layer")


def test_a_module_in_two_stages():
    class Twice(Model):
        def forward(self, x):
            return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))

    assert pipe(Twice(), stages="layer").stages == 2
    model = Twice()
    model.c = model.a  # two names
    assert pipe(model, stages="layer").stages == 2


class Rotary(nn.Module):
    """A buffer that two layers read, one of them as an argument."""

    def __init__(self, change=False):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.register_buffer("turn", torch.randn(4))
        self.register_buffer("shift", torch.randn(4), persistent=False)
        self.change = change

    def forward(self, x):
        x = self.b(self.a(x + self.turn) * self.turn + self.shift) + self.a.weight.sum() * 0 + self.turn
        if self.change:
            self.turn.add_(1)
        return x


def test_buffers_that_several_stages_read():
    plain = Rotary()
    found = pipe(copy.deepcopy(plain), stages="layer")
    held = [name for part in found.split.parts for name in part.module.state_dict()]
    assert sorted(held) == sorted(plain.state_dict())
    wanted = mse_loss(plain(X), X)
    assert torch.equal(found.push(X, X), wanted.detach())
    refused("buffer 'turn' is changed by the forward, and stages 0 and 1 read it", Rotary(True), stages="layer")


def test_a_wrong_input():
    found = pipe(Deep(), stages="layer")
    with pytest.raises(TypeError, match="push takes tensors, or structures with tensors"):
        found.push("words", X)
    with pytest.raises(Exception, match="4"):
        found.push(torch.randn(3, 5), X)
    assert torch.isfinite(found.push(X, X))


class Picked(nn.Module):
    """Takes rows by a list of Python, of which no torch function says how long it is."""

    def forward(self, x):
        return x[[n for n, value in enumerate(x[:, 0].tolist()) if value > 0]]


def test_shapes_that_depend_on_values():
    model = Model(lambda own, x: own.picked(x))
    model.picked = Picked()
    found = pipe(model, loss=lambda out, y: out.square().sum(), stages="layer")
    found.push(X, X)
    with pytest.raises(Exception, match=r"traced with .*where shapes depend on values.*leaves="):
        for k in range(20):
            found.push(torch.randn(3, 4, generator=torch.Generator().manual_seed(k)), X)
