"""Law: stages of any layers that are asked to run as one give what the event loop gives.

They do so as one or as they are, whatever forms of micro-batches come.
"""

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.vectorized.making.graph_maker import GraphMaker
from pipeback.vectorized.stacks.stack import KINDS
from tests.helpers.choice import diagonal, mostly_rare, rare
from tests.laws.cases import CASES, STEADY, pipeline, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")
FLAT, LINE, IMAGE = (6,), (4, 5), (4, 5, 4)


class Called(nn.Module):
    """A layer in a function of itself and the input."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer, x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x).tanh()


class Torn(nn.Module):
    """Decides by a value where micro-batches are larger than one sample (or not larger), which no graph can."""

    def __init__(self, large):
        super().__init__()
        self.one, self.other, self.large = nn.Linear(6, 6), nn.Linear(6, 6), large

    def forward(self, x):
        y = torch.tanh(self.one(x) + self.other(x))  # the gradients of these two are one and the same
        if (len(x) > 1) == self.large:
            return -y if x.sum() > 0 else self.one(x)  # the other one gets no gradient
        return y


def frozen(layer, *numbers):
    for n, p in enumerate(layer.parameters()):
        p.requires_grad_(n not in numbers)
    return layer


def linear(*behind):
    return nn.Sequential(nn.Linear(6, 6), *behind)


def conv(*behind, **options):
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, **options), *behind)


def attention():
    return Called(nn.MultiheadAttention(5, 1, batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0])


STAGES = {
    **{name: (lambda name=name: linear(getattr(nn, name)()), FLAT)
       for name in ("ReLU", "ELU", "GELU", "Hardswish", "LeakyReLU", "LogSigmoid", "Mish", "PReLU", "Sigmoid", "SiLU",
                    "Softplus", "Softshrink", "Softsign", "Tanhshrink")},
    "nothing behind": (linear, FLAT),
    "in place": (lambda: linear(nn.ReLU(True)), FLAT),
    "in place first": (lambda: nn.Sequential(nn.ReLU(True), nn.Linear(6, 6)), FLAT),
    "softmax": (lambda: linear(nn.Softmax(-1)), FLAT),
    "glu": (lambda: nn.Sequential(nn.Linear(6, 12), nn.GLU()), FLAT),
    "one wide": (lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh()), (1,)),
    "LayerNorm first": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), FLAT),
    "RMSNorm": (lambda: linear(nn.RMSNorm(6)), FLAT),
    "bilinear": (lambda: Called(nn.Bilinear(6, 6, 6), lambda m, x: m(x, x)), FLAT),
    "frozen weight": (lambda: frozen(linear(nn.Tanh()), 0), FLAT),
    "frozen bias": (lambda: frozen(linear(nn.Tanh()), 1), FLAT),
    "nothing kept": (lambda: frozen(Called(nn.Linear(6, 1), lambda m, x: x + m(x).expand_as(x)), 0), FLAT),
    "unused": (Unused, FLAT),
    "a weight of a layer": (lambda: Called(nn.Linear(6, 6), lambda m, x: x @ m.weight), FLAT),
    "its input": (lambda: Called(nn.Linear(6, 6), lambda m, x: x), FLAT),
    "a constant": (lambda: Called(nn.Linear(6, 6), lambda m, x: m(torch.ones_like(x))), FLAT),
    "in double": (lambda: Called(nn.Linear(6, 6), lambda m, x: m(x).double().sin().to(x.dtype)), FLAT),
    "drawing": (lambda: linear(nn.Dropout(0.1)), FLAT),
    "torn when large": (lambda: Torn(True), FLAT),
    "torn when small": (lambda: Torn(False), FLAT),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()), LINE),
    "attention": (attention, LINE),
    "LSTM": (lambda: Called(nn.LSTM(5, 5, batch_first=True), lambda m, x: m(x)[0]), LINE),
    "encoder": (lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True), LINE),
    "Conv2d": (conv, IMAGE),
    "Conv2d and ReLU": (lambda: conv(nn.ReLU()), IMAGE),
    "frozen convolution": (lambda: frozen(conv(nn.ReLU()), 0), IMAGE),
    "depthwise": (lambda: conv(nn.ReLU(), groups=4), IMAGE),
    "grouped": (lambda: conv(nn.ReLU(), groups=2), IMAGE),
    "circular": (lambda: conv(nn.ReLU(), padding_mode="circular"), IMAGE),
    "GroupNorm first": (lambda: nn.Sequential(nn.GroupNorm(2, 4), conv()), IMAGE),
    "GroupNorm behind": (lambda: conv(nn.GroupNorm(2, 4), nn.ReLU(True)), IMAGE),
    "pooled": (lambda: conv(nn.MaxPool2d(3, 1, 1)), IMAGE),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3, padding=1), nn.ReLU()), IMAGE),
    "shuffled": (lambda: conv(nn.PixelShuffle(2), nn.PixelUnshuffle(2)), IMAGE),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.ReLU()), (2, 3, 3, 3)),
}  # fmt: skip
SIZES = {"one": [1] * 6, "two": [2] * 6, "one, then two": [1, 1, 1, 2, 2, 2, 1, 2], "odd": [3, 1, 4, 2, 5]}
USUAL = [
    ("in place first", "two"), ("unused", "one"), ("attention", "two"), ("Conv1d", "one, then two"),
    ("depthwise", "two"), ("GroupNorm first", "two"), ("nothing kept", "one"), ("a constant", "one"), ("LSTM", "one"),
    ("torn when large", "one, then two"), ("torn when small", "two"), ("drawing", "one"),
]  # fmt: skip


def trained(vectorize, make, shape, sizes, method="pb", dtype=torch.float64, head=nn.Tanh, **options):
    """Losses and weights in flight, and drained; a state was taken up on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), *[make() for _ in range(4)], head()).to(dtype)
    optimizer = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)  # noqa: E731
    pipe = pipeback.Pipeline(model, loss=mse_loss, optimizer=optimizer, method=method, vectorize=vectorize, **options)
    generator, losses = torch.Generator().manual_seed(1), []
    for n, size in enumerate(sizes):
        x, y = torch.randn(2, size, *shape, generator=generator, dtype=torch.float64).to(dtype)
        losses.append(pipe.push(x, y))
        if n == 3:
            pipe.load_state_dict(pipe.state_dict())
    flying = weights(pipe)
    pipe.drain()
    return pipe, [torch.stack([loss.double() for loss in losses]), flying, weights(pipe)]


@pytest.fixture
def never_slower(monkeypatch):
    """Have "auto" choose whatever can run as one."""
    monkeypatch.setattr("pipeback.vectorized.stacks.whole_cost.gain", lambda stack, under, whole: 100.0)


@pytest.mark.parametrize(
    ("name", "sizes"), mostly_rare([(name, sizes) for name in STAGES for sizes in SIZES], *USUAL), ids=str
)
def test_any_stages(name, sizes, never_slower):
    make, shape = STAGES[name]
    found, wanted = (trained(on, make, shape, SIZES[sizes])[1] for on in ("auto", False))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", mostly_rare(STEADY, "gpipe-4", "pipedream"))
@pytest.mark.parametrize("name", ["torn when large", "torn when small"])
def test_kinds_that_take_turns(name, case, never_slower):
    """Gradients of both are summed for one update, and what is in flight is of both."""
    make, shape = STAGES[name]
    sizes = [1, 2, 2, 1, 1, 2, 1, 2, 2, 1, 2, 2, 2, 2, 1, 1, 1, 1, 2, 1]
    found, wanted = (trained(on, make, shape, sizes, CASES[case](6)) for on in ("auto", False))
    for a, b in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["pipedream", "pipeoptim"])
def test_weights_in_channels_last(case, never_slower):
    """Of stages that run as graphs, each by itself."""

    def build():
        torch.manual_seed(0)
        sizes = [(4, 6), (6, 6), (6, 6), (6, 8), (8, 4)]
        model = nn.Sequential(*[nn.Sequential(nn.Conv2d(*size, 3, padding=1), nn.Tanh()) for size in sizes])
        return model.double().to(memory_format=torch.channels_last)

    torch.manual_seed(1)
    x, y = torch.randn(2, 40, 4, 4, 5, dtype=torch.float64)
    found = []
    for on in (False, "auto"):
        pipe = pipeline(build(), CASES[case](5), micro_batch_size=1, vectorize=on)
        losses = [pipe.push(a, b) for a, b in zip(x.split(20), y.split(20), strict=True)]
        pipe.drain()
        found.append([torch.stack(losses), weights(pipe)])
    assert sum(told.startswith("as a graph") for told in pipe.vectorized.values()) > 1, pipe.vectorized
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [nn.GRU, rare(nn.RNN), rare(nn.LSTM)])
def test_what_a_layer_makes_of_zeros_of_its_own(layer, never_slower):
    """It is no function of the weights alone: B takes it as F has made it."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 40, 3, 5, dtype=torch.float64)
    found = []
    for on in (False, "auto"):
        torch.manual_seed(0)
        recurrent = Called(layer(5, 5, batch_first=True), lambda m, x: m(x)[0])
        pipe = pipeline(nn.Sequential(nn.Linear(5, 5), recurrent, nn.Linear(5, 5)).double(), "pb", vectorize=on)
        losses = [pipe.push(a, b) for a, b in zip(x.split(4), y.split(4), strict=True)]
        pipe.drain()
        found.append([torch.stack(losses), weights(pipe)])
    assert pipe.vectorized["stage 1"].startswith("as a graph"), pipe.vectorized
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_what_runs_as_it_is_later_is_told():
    make, shape = STAGES["torn when large"]
    pipe, _ = trained(True, make, shape, [1, 1, 2])
    told = pipe.vectorized["stages 1 … 4"]
    assert told.startswith("as one, ") and "; micro-batches (2, 6) stage by stage: their forward decides" in told


@pytest.mark.parametrize("name", mostly_rare(STAGES, "Conv1d"))
def test_half_types(name, never_slower):
    """To the rounding of the type: sums are made in another order."""
    make, shape = STAGES[name]
    found, wanted = (trained(on, make, shape, [2, 1, 2, 2], dtype=torch.bfloat16)[1] for on in ("auto", False))
    for a, b in zip(found, wanted, strict=True):
        assert torch.linalg.vector_norm(a - b) <= 0.05 * torch.linalg.vector_norm(b)


@pytest.mark.parametrize("size", [1, 2])
def test_stages_of_a_followed_sequence(size):
    """The first of them needs no gradient of its input, and the others do."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())]
        x = torch.randn(size, 6, dtype=torch.float64)
        pipe = pipeback.Pipeline(
            nn.Sequential(*layers).double(), loss=mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
            method="pb", stages="layer", example=x, vectorize=on,
        )  # fmt: skip
        found.append(torch.stack([pipe.push(x, x.sin()) for _ in range(8)]))
    assert list(pipe.vectorized) == ["stages 0 … 3"]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_last_stage_that_changes_its_input():
    make, shape = STAGES["Tanhshrink"]
    last = lambda: nn.Sequential(nn.ReLU(True), nn.Linear(6, 6))  # noqa: E731
    found, wanted = (trained(on, make, shape, [40, 40], head=last, micro_batch_size=1)[1] for on in (True, False))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_memory_of_many_forms_is_bounded():
    """Those that came last have memory; one that comes back gets it anew, with the numbers of the event loop. All that
    there is is told.
    """
    make, shape, found = *STAGES["nothing behind"], []
    sizes = [size for size in (*range(1, 9), 2, 8, 1) for _ in range(9)]
    for on in (True, False):
        pipe, told = trained(on, make, shape, sizes)
        found.append(told)
        if on:
            every = [[rings.nbytes for rings in stack._rings.values()] for stack in pipe._engine.setting.stacks]
            assert [len(each) for each in every] == [8, 8] and 1 <= sum(map(bool, every[1])) <= KINDS + 1
            held = sum(len(stack.stages) * stack.held for stack in pipe._engine.setting.stacks)
            assert held + pipe.memory().beside == sum(map(sum, every))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("then", [0, 30])
def test_memory_of_forms_in_flight_goes_with_them(then):
    """Of five sizes in flight at once, each has its own; then the last one stays, or all is drained."""
    make, shape = STAGES["nothing behind"]
    pipe, told = trained(True, make, shape, [1, 2, 3, 4, 5, *[5] * then])
    other = trained(False, make, shape, [1, 2, 3, 4, 5, *[5] * then])[1]
    for stack in pipe._engine.setting.stacks:
        assert sum(bool(rings.nbytes) for rings in stack._rings.values()) <= KINDS
    torch.testing.assert_close(told, other, rtol=1e-9, atol=1e-9)


@pytest.fixture
def learnt(monkeypatch):
    """Of every stack, the sizes of micro-batches that graphs were made for, and the rings that there were."""
    found, learn = {}, GraphMaker.learn

    def learning(maker, kind, x):
        waiting = learn(maker, kind, x)
        if len(maker.stages) > 1:
            name = tuple(stage.index for stage in maker.stages)
            found.setdefault(name, []).append((kind.inputs[0][0][0], weakref.ref(waiting)))
        return waiting

    monkeypatch.setattr(GraphMaker, "learn", learning)
    return found


MANY = [size for size in (1, 2, 3, 4, 5, 6, 2, 1, 1, 3) for _ in range(12)]


@pytest.mark.parametrize(
    ("method", "compile"), mostly_rare(product(["pb", "pipedream"], [False, True]), ("pipedream", True))
)
def test_graphs_of_many_forms_are_bounded(method, compile, learnt, monkeypatch):
    """Those of the forms that were used last, and of those in flight: the others go with all that was made of them,
    and one that comes back is learnt anew and gives the same bits.
    """
    make, shape = STAGES["nothing behind"]
    if compile:  # whole ticks are made, but by nobody who takes a minute
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    _, wanted = trained(True, make, shape, MANY, method, compile=compile)
    assert all(len(sizes) == 6 for sizes in learnt.values())
    learnt.clear()
    monkeypatch.setattr("pipeback.vectorized.making.bounded_cache.FORMS", 2)
    pipe, found = trained(True, make, shape, MANY, method, compile=compile)
    assert all(map(torch.equal, found, wanted))
    (steady,) = (loop.worker.executor._steady for loop in pipe._engine.loops)
    known = [steady._moving, *(stack._rings for stack in pipe._engine.setting.stacks)]
    assert {len(some) for some in known} == {2}
    assert max(map(len, (steady._judges, steady._fused))) <= 2
    gc.collect()
    for sizes in learnt.values():
        assert [size for size, _ in sizes] == [1, 2, 3, 4, 5, 6, 2, 1, 3]
        assert [rings() is None for _, rings in sizes][:-3] == [True] * 6


@pytest.mark.parametrize(("forms", "times"), diagonal([3, 2], [1, 5, 16]))
def test_forms_that_take_turns_are_learnt_once(forms, times, learnt):
    make, shape = STAGES["nothing behind"]
    sizes = [size for _ in range(4) for size in range(1, forms + 1) for _ in range(times)]
    trained(True, make, shape, sizes)
    assert [[size for size, _ in sizes] for sizes in learnt.values()] == [[*range(1, forms + 1)]]


def test_memory_is_there_again_after_a_form_that_does_not_fit(never_slower, monkeypatch):
    monkeypatch.setattr("pipeback.vectorized.stacks.stack.KINDS", 1)
    make, shape = STAGES["torn when large"]
    sizes = [size for size in (1, 2, 1, 2, 1) for _ in range(12)]
    found, wanted = (trained(on, make, shape, sizes)[1] for on in ("auto", False))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
