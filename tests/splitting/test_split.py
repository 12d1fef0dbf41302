"""Splitting: the ladder, granularity, what crosses a boundary, and what is refused before anything is trained."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.splitting.call_cost import Work
from pipeback.splitting.cut_points import blocks_of, family
from pipeback.splitting.split import split_model
from pipeback.splitting.traced_model import TracedModel
from pipeback.tensors import meta
from tests.splitting.models import Deep, X, linear, pipe


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
    assert "2 stages by d: its forward, traced" in told
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
    again = pipe(other, stages=2, store=pipeback.Streaming(init=tmp_path))
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

    found = pipe(Tied(), stages=pipeback.Splitting("layer", leaves=["head"]))
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
