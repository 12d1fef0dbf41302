"""Random numbers of Python and numpy: a forward that computes by them is not cut; a stage draws what a loop draws."""

import random
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from torch import nn

import pipeback
from pipeback.splitting import outside_draws
from pipeback.splitting.split import split_model

FOUND = random.Random(0)  # beside the forwards below
DRAWS = {
    "random.random": lambda m: random.random(),
    "random.uniform": lambda m: random.uniform(0, 1),
    "numpy.random.rand": lambda m: numpy.random.rand(),  # noqa: NPY002
    "numpy.random.choice": lambda m: 1.0 - numpy.random.choice([0.0, 1.0], p=[1 - m.p, m.p]),  # noqa: NPY002
    "Random beside": lambda m: FOUND.random(),
    "Random held": lambda m: m.held.random(),
    "RandomState held": lambda m: m.legacy.random_sample(),
}
EXACT = {**DRAWS, "Generator held": lambda m: m.numbers.random()}


class Drops(nn.Module):
    """Leaves out each of its layers with probability p."""

    def __init__(self, draw, p):
        super().__init__()
        self.layers, self.draw, self.p = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), draw, p
        self.held, self.legacy = random.Random(1), numpy.random.RandomState(1)
        self.numbers = numpy.random.default_rng(1)

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.draw(self) < self.p:
                continue
            x = layer(x).tanh()
        return x


class Whole(nn.Module):
    """skip: adds what it gives the dropped layers to what it gets from them, which may be the same tensor."""

    def __init__(self, draw, p, skip=False, seed=0):
        super().__init__()
        self.first, self.drops, self.head = nn.Linear(6, 6) if skip else None, Drops(draw, p), nn.Linear(6, 6)
        self.drops.held.seed(seed), self.drops.legacy.seed(seed)
        self.drops.numbers = numpy.random.default_rng(seed)

    def forward(self, x):
        if self.first is None:
            return self.head(self.drops(x))
        x = self.first(x)
        return self.head(x + self.drops(x))


def made(draw, p, *more):
    torch.manual_seed(0)
    for generator in (FOUND, random, numpy.random):
        generator.seed(more[1] if more else 0)
    return Whole(draw, p, *more)


def build(model, **options):
    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    options = dict(loss=nn.functional.mse_loss, optimizer=sgd, method="sgd", example=torch.randn(4, 6)) | options
    return pipeback.Pipeline(model, **options)


KEPT = pipeback.Splitting(leaves=["drops"])


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("p", [1e-6, 0.5, 1 - 1e-6])
def test_a_layer_drop_is_refused_whatever_its_probability(draw, p):
    with pytest.raises(ValueError, match=r"Drops 'drops'.forward computes by random .*; switch that off, or keep") as e:
        build(made(DRAWS[draw], p))
    assert str(e.value).endswith("keep it whole: stages=pipeback.Splitting(leaves=['drops'])")


@pytest.mark.parametrize("draw", DRAWS)
def test_one_that_is_switched_off_is_cut(draw):
    assert len(build(made(DRAWS[draw], 0.0)).optimizers) == 4


def test_a_generator_that_cannot_be_told_what_to_draw_is_refused_where_it_draws():
    with pytest.raises(ValueError, match=r"Drops 'drops'.forward computes by random numbers of Python or numpy"):
        build(made(EXACT["Generator held"], 0.0))


def test_a_number_that_is_drawn_is_not_repeated():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.second(self.first(x) * random.uniform(0.999, 1.001))

    with pytest.raises(ValueError, match=r"Noise.forward computes by random numbers of Python or numpy"):
        build(Noise())


@pytest.mark.parametrize("draw", EXACT)
@pytest.mark.parametrize(("skip", "seed"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_a_stage_draws_what_the_plain_loop_draws(draw, skip, seed):
    """Neither cutting nor rehearsing draws; in some of these all layers are dropped while the model is traced."""
    pushes = [torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    plain = made(EXACT[draw], 0.5, skip, seed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for x, y in pushes:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    pipe = build(made(EXACT[draw], 0.5, skip, seed), stages=KEPT)
    assert [pipe.push(x, y).item() for x, y in pushes] == wanted
    assert all(map(torch.equal, pipe.model.parameters(), plain.parameters()))


def test_it_is_not_recomputed():
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"stage 0 \(drops\): activations='recompute' repeats .*activations='device'$"):
        build(made(DRAWS["random.random"], 0.5), stages=KEPT, activations="recompute").push(x, x)
    build(made(DRAWS["random.random"], 0.5), stages=KEPT, activations="device").push(x, x)


class InPlace(nn.Module):
    """Draws with torch into a tensor that was there."""

    def __init__(self, draw):
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw():
                x = layer(x)
        return x


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty([]).uniform_() > 1e-9,
        lambda: torch.empty(1).bernoulli_(1 - 1e-9) > 0.5,
        lambda: torch.rand_like(torch.zeros(1)) > 1e-9,
        lambda: torch.multinomial(torch.tensor([1e-9, 1.0]), 1) > 0,
    ],
)
def test_of_torch_too_when_drawn_in_place(draw):
    with pytest.raises(ValueError, match="InPlace.forward draws a random number and decides by it which layers run"):
        build(InPlace(draw))


class Inner(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


class Outer(nn.Module):
    """Draws between a layer of torch and a module that is traced into, which is not the one that draws."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Inner(nn.Linear(6, 6))

    def forward(self, x):
        return self.inner(self.first(x) * random.random())


def test_the_module_that_draws_is_named_and_not_the_next():
    with pytest.raises(ValueError, match="Outer 'outer'"):
        split_model(nn.Sequential(OrderedDict(outer=Outer(), last=nn.Linear(6, 6))), "layer", torch.randn(2, 6))


@pytest.fixture
def counted(monkeypatch):
    """How often the state of Python's generator is read."""
    counts, read = Counter(), random.getstate

    def counting():
        counts["reads"] += 1
        return read()

    monkeypatch.setattr(random, "getstate", counting)
    return counts


def test_nobody_looks_around_layers_of_torch(counted):
    reads = []
    for layers in (2, 20):
        counted.clear()
        split_model(Inner(nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])), "layer", torch.randn(2, 6))
        reads.append(counted["reads"])
    assert reads[0] == reads[1]


def test_numpys_state_is_read_anew_only_where_it_may_have_changed(monkeypatch):
    counts, read_it = Counter(), numpy.random.get_state

    def counting(**given):
        counts["reads"] += 1
        return read_it(**given)

    numpy.random.seed(0)  # noqa: NPY002
    monkeypatch.setattr(numpy.random, "get_state", counting)
    (_, of_numpy, *_) = outside_draws.generators([])
    states = [of_numpy.read() for _ in range(5)]
    assert counts["reads"] == 1
    assert not outside_draws.drawn([of_numpy], states[:1])
    numpy.random.rand()  # noqa: NPY002
    assert outside_draws.drawn([of_numpy], states[:1])


@pytest.mark.parametrize("before", [0, 1, 2, 3, 1249])
@pytest.mark.parametrize("draw", ["randn", "rand", "randint", "standard_gamma"])
def test_every_draw_of_numpy_is_noticed(draw, before):
    """A normal number may come from one that was drawn before, and leaves the words of the generator as they are."""
    numpy.random.seed(0)  # noqa: NPY002
    for _ in range(before):
        numpy.random.randn()  # noqa: NPY002
    (_, of_numpy, *_) = outside_draws.generators([])
    for _ in range(4):
        states = outside_draws.read([of_numpy])
        assert not outside_draws.drawn([of_numpy], states)
        expected = numpy.random.get_state(legacy=False)  # noqa: NPY002
        getattr(numpy.random, draw)(*[3] * (draw in ("randint", "standard_gamma")))
        assert outside_draws.drawn([of_numpy], states)
        outside_draws.write([of_numpy], states)
        found = numpy.random.get_state(legacy=False)  # noqa: NPY002
        assert (found["state"]["key"] == expected["state"]["key"]).all()
        assert [found[key] for key in ("has_gauss", "gauss")] == [expected[key] for key in ("has_gauss", "gauss")]
        assert not outside_draws.drawn([of_numpy], states)
        numpy.random.randn()  # noqa: NPY002


def test_a_hook_on_a_layer_of_torch_may_draw_what_it_likes():
    model = Inner(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    numbers = model.numbers = numpy.random.default_rng(1)
    model.layers[0].register_forward_hook(lambda *_: numbers.random() and None)
    assert len(split_model(model, "layer", torch.randn(2, 6)).parts) == 2
