"""Splitting: the ladder, granularity, what crosses a boundary, and what is refused before anything is trained."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.splitting.cut_points import blocks_of, family
from pipeback.splitting.split import split_model
from pipeback.splitting.traced_model import TracedModel
from pipeback.splitting.work import Work
from pipeback.tensors import meta

X = torch.randn(3, 4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def linear():
    return nn.Linear(4, 4)


class Model(nn.Module):
    """Two layers around what a test does between them."""

    def __init__(self, between=None):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.between = (between or (lambda own, x: x),)

    def forward(self, x):
        return self.b(self.between[0](self, self.a(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.stem, self.blocks = linear(), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), linear()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pipe(model, x=X, loss=mse_loss, **options):
    return pipeback.Pipeline(model, loss=loss, optimizer=sgd, method="sgd", example=x, **options)


def names(model, stages, x=X, **options):
    return [part.name for part in split_model(model, stages, x, **options).parts]


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_rungs():
    torchvision = pytest.importorskip("torchvision")

    class Hooked(Deep):
        def pipeline_stages(self):
            return [self.stem, *self.blocks, nn.Sequential(self.norm, self.head)]

    def rung(model, stages="auto", x=X):
        found = split_model(model, stages, x)
        return found.rung[0], list(found.reasons)

    tied = nn.Sequential(linear(), nn.Tanh(), linear())
    tied[2].weight = tied[0].weight
    assert rung(nn.Sequential(linear(), linear())) == ("a", [])
    assert rung([linear(), linear()]) == ("a", [])
    assert rung(tied) == ("d", ["a", "b", "c"])
    assert rung(nn.Sequential(linear(), linear()), "layer") == ("d", ["a", "b", "c"])
    assert rung(Hooked()) == ("b", ["a"])
    assert rung(Hooked(), "layer") == ("d", ["a", "b", "c"])
    assert rung(torchvision.models.resnet18(), x=torch.randn(2, 3, 32, 32)) == ("c", ["a", "b"])
    assert rung(Deep()) == ("d", ["a", "b", "c"])
    told = str(split_model(tied, "auto", X))
    assert "2 stages by d: its forward, followed" in told
    assert "not a: stages 0 and 2 share a parameter (0.weight is 2.weight)" in told


def test_a_sequence_whose_modules_hand_on_structures():
    class Give(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return {"x": self.inner(x), "none": None, "more": (x, "word", 3)}

    class Take(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, given):
            assert given["none"] is None and given["more"][1:] == ("word", 3)
            return self.inner(given["x"]) * given["more"][0]

    model = nn.Sequential(Give(), Take(), linear())
    found = split_model(model, "auto", X)
    assert found.rung[0] == "d" and "a dict goes into '1'" in found.reasons["a"]
    assert [part.name for part in found.parts] == ["0", "1", "2"]
    plain = torch.nn.Sequential(*model)
    wanted = mse_loss(plain(X), X)
    assert torch.equal(pipe(model).push(X, X), wanted.detach())


# -- granularity -------------------------------------------------------------------------------------------------------


def test_granularity():
    layers = ["stem", *(f"blocks.{n}.{part}" for n in range(3) for part in ("up", "down")), "head"]
    assert names(Deep(), "block") == ["stem", "blocks.0", "blocks.1", "blocks.2", "norm…head"]
    assert names(Deep(), "auto") == names(Deep(), "block")
    assert names(Deep(), "layer") == layers
    assert len(names(Deep(), "sublayer")) == 1 + 3 * 3 + 2
    assert len(names(Deep(), 3)) == 3 and len(names(Deep(), 8)) == 8
    assert names(Deep(), ["blocks.1", "head"]) == ["stem…blocks", "blocks…norm", "head"]
    assert names(Deep(), "layer", leaves=["blocks.1"])[3] == "blocks.1"
    assert names(nn.Sequential(linear(), nn.ReLU(), linear(), linear()), 2) == ["0…1", "2…3"]


def test_balance_by_memory():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 400), nn.Linear(400, 4), linear(), linear(), linear()])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    found = split_model(Uneven(), 3, X, balance="memory")
    sizes = [sum(p.numel() for p in part.module.parameters()) for part in found.parts]
    assert sizes == [2000, 1604, 60]


def test_families_and_blocks():
    torchvision = pytest.importorskip("torchvision")
    assert family(torchvision.models.resnet18()).blocks == ("BasicBlock", "Bottleneck")
    assert len(blocks_of(torchvision.models.resnet50())) == 16
    assert len(blocks_of(nn.Transformer(8, 2, 2, 3, 8))) == 5
    assert family(Deep()) is None and blocks_of(Deep()) == ["blocks.0", "blocks.1", "blocks.2"]


# -- names stay the user's ---------------------------------------------------------------------------------------------


def test_names_and_weights_are_the_users(tmp_path):
    model = Deep()
    every = dict(model.state_dict())
    found = pipe(model, stages="layer")
    held = [name for part in found.split.parts for name in part.module.state_dict()]
    assert sorted(held) == sorted(every)
    assert {name for _, values in found.values() for name in values} == set(every)
    assert found.model is model
    pytest.importorskip("safetensors")
    pipeback.weights.save(found, tmp_path)
    with torch.device("meta"):
        other = Deep()
    again = pipe(other, stages=2, init=tmp_path)
    for (name, value), wanted in zip(again.model.state_dict().items(), every.values(), strict=True):
        assert torch.equal(value, wanted), name


def test_a_tied_weight_is_copied_once_while_it_stays_the_same():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.tanh(self.embed(x)))

    x = torch.arange(5)
    model = Tied()
    first = split_model(model, "layer", x).parts[0].module
    one, two = first(x)[1], first(x)[1]
    assert one.data_ptr() == two.data_ptr() != model.embed.weight.data_ptr()
    with torch.no_grad():
        model.embed.weight += 1
    assert torch.equal(first(x)[1], model.embed.weight) and not torch.equal(one, model.embed.weight)


def test_hooks_and_modes_of_layers_stay_alive():
    model, heard = Deep(), []
    model.head.register_forward_hook(lambda *_: heard.append("head"))
    found = pipe(model)
    heard.clear()
    found.push(X, X)
    assert heard.count("head") >= 1
    assert "self.head" in found.split.program.segments[-1].__script__()


# -- what is refused ---------------------------------------------------------------------------------------------------


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
    assert pipe(model, stages="layer", leaves=["1"]).stages == 3


def test_decisions_by_values():
    found = pipe(Model(lambda own, x: torch.relu(x) if x.sum() > -1e9 else x), stages="layer")
    found.push(X, X)
    fickle = Model(lambda own, x: torch.relu(x) if x.sum() > 0 else x)
    fickle.a = nn.Identity()
    found = pipe(fickle, X.abs(), stages="layer")
    found.push(X.abs(), X)
    wrong = r"Model.forward goes another way for this micro-batch: __bool__ gave False, but True.*leaves="
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
    found = pipe(model, stages="layer", leaves=["two"])
    found.push(X, X)
    model.two.more = True
    with pytest.raises(Exception, match=r"Two 'two' gave another structure than when the model was followed"):
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
    refused("leaves: Deep has no module 'nowhere'", Deep(), leaves=["nowhere"])
    refused("balance must be", Deep(), stages=2, balance="weight")
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


def test_shapes_that_depend_on_values():
    found = pipe(Model(lambda own, x: x[x[:, 0] > 0]), loss=lambda out, y: out.square().mean(), stages="layer")
    found.push(X, X)
    with pytest.raises(Exception, match=r"followed with .*where shapes depend on values.*leaves="):
        for k in range(20):
            found.push(torch.randn(3, 4, generator=torch.Generator().manual_seed(k)), X)


class Made(nn.Module):
    """Makes tensors where its input is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = self.first(x + torch.arange(4, device=x.device))
        return self.second(x + torch.ones(4, device=x.device))


def test_a_stage_computes_where_its_input_is():
    """In a store the weights are followed in host memory, and compute elsewhere; here on the meta device."""
    model = Made()
    program = TracedModel(model, X, "layer")
    value = X.to("meta")
    meta.let_go(model)
    for segment in program.segments:
        value = segment(value)
    assert value.is_meta and len(program.segments) == 2


def test_a_layer_with_a_tied_weight_trains_and_evaluates_as_the_model_is_set():
    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.inner, self.drop = nn.Linear(4, 4, bias=False), nn.Dropout(0.5)
            self.inner.weight = weight

        def forward(self, x):
            return self.drop(self.inner(x))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()
            self.head = Head(self.a.weight)

        def forward(self, x):
            return self.head(self.b(self.a(x)))

    found = pipe(Tied(), stages="layer", leaves=["head"])
    found.push(X, X)
    assert torch.equal(found.evaluate(X), found.evaluate(X))
    found.model.head.eval()
    wanted = mse_loss(copy.deepcopy(found.model)(X), X)
    assert torch.equal(found.push(X, X), wanted)
    assert found.model.training and not found.model.head.training


class Uneven(nn.Module):
    """Six layers, of which the first does as much as the others together."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x):
        x = self.wide(x.repeat(40000, 1))[: len(x)]
        for layer in self.narrow:
            x = layer(x).tanh()
        return x


def test_a_number_of_stages_goes_by_work_that_is_counted(monkeypatch):
    """However long anything takes; two thirds of a product of matrices lie in it."""
    one, other = torch.ones(50, 30), torch.ones(30, 20)
    with Work() as work:
        torch.mm(one, other)
    assert work.done == 2 * 50 * 30 * 20 + 8 * 4 * (50 * 30 + 30 * 20 + 50 * 20) + 1e5
    clock = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) ** 3 % 1009)
    for count in (2, 3):
        found = [split_model(Uneven(), count, torch.randn(3, 6)).parts for _ in range(3)]
        layers = [[sum(isinstance(m, nn.Linear) for m in part.module.modules()) for part in parts] for parts in found]
        assert len(layers[0]) == count and layers[0][0] == 1 and layers == layers[:1] * 3
