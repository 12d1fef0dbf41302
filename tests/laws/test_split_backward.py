"""Law: splitting B into I, the gradient of the input, and W, that of the weights, changes no bit.

I(i) and W(i) together are B(i): in every stage that can be split, and under every method, if its order is kept. A stage
that cannot be split does all in I, and says why.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeback
from pipeback import methods
from pipeback.private import TorchDispatchMode
from pipeback.runtime.loop import Loop
from pipeback.schedules.ops import Op
from pipeback.stages import split_backward
from pipeback.stages.stage import Stage
from tests.helpers.choice import diagonal, mostly_rare
from tests.laws.cases import CASES, EACH, FLUSHES, STAGES, data, everything, network, pipeline, suited, weights


def divided(schedule):
    """The schedule with I and W one after the other in the place of B."""

    def program(stage, stages):
        for op in schedule(stage, stages):
            yield from (Op("I", op.mb), Op("W", op.mb)) if op.kind == "B" else (op,)

    return program


def run(method, optimizer="momentum", **options):
    pipe = pipeline(network(), method, optimizer, micro_batch_size=3, **options)
    found = []
    for n in FLUSHES:
        x, y = (torch.cat(parts) for parts in zip(*data(n, seed=n), strict=True))
        found.append(pipe.push(x, y).clone().double().reshape(1))
    pipe.drain()
    kinds = {record.kind for record in pipe.ledger}
    assert kinds == {"F", "B"}
    found += [everything(pipe), weights(pipe)]
    whole = pipe.unsplit
    pipe.close()
    return torch.cat(found), whole


@pytest.mark.parametrize("case", mostly_rare(CASES, *EACH))
def test_every_method_with_its_backwards_split(case, monkeypatch):
    optimizer = suited(case)
    wanted, _ = run(CASES[case](STAGES), optimizer)
    before, seen = Loop._of_method, []

    def of_method(self, start, pushed):
        seen.append(start)
        return divided(before(self, start, pushed))

    monkeypatch.setattr(Loop, "_of_method", of_method)
    found, whole = run(CASES[case](STAGES), optimizer)
    assert seen and not whole and torch.equal(found, wanted)


RUNTIMES = {
    "two threads": {"workers": 2},
    "a thread per stage": {"workers": STAGES},
    "two replicas": {"replicas": 2},
    **{order: {"debug": pipeback.Debug(order=order)} for order in ("skewed", "random", "sticky", "upstream")},
    "a store": {"store": "host"},
    "masters": {"masters": True},
    "clipped": {"clip_norm": pipeback.Clipping(0.1, value=0.05)},
    "by samples": {"micro_batch_size": pipeback.MicroBatches(2, weights="samples")},
    "recomputed": {"activations": "recompute"},
    "some on the host": {"activations": {1: "host", 3: "recompute"}},
}


@pytest.mark.parametrize(("runtime", "flush", "name"), diagonal(["", *RUNTIMES], [4, None, 7], ["zb_h1", "zb_h2"]))
def test_zero_bubble_is_gpipe(name, runtime, flush):
    """Weight for weight and loss for loss, with whatever a pipeline does beside it."""
    options = {"micro_batch_size": 3, **RUNTIMES.get(runtime, {})}
    size = options.pop("micro_batch_size")

    def trained(method):
        model = network(dtype=torch.bfloat16 if "masters" in options else torch.float32)
        pipe = pipeline(model, methods.create(method, micro_batches=flush), micro_batch_size=size, **options)
        found = []
        for n in FLUSHES:
            x, y = (torch.cat(parts) for parts in zip(*data(2 * n, seed=n), strict=True))
            found.append(pipe.push(x.to(model[0][0].weight), y.to(model[0][0].weight)).double().reshape(1).clone())
        pipe.drain()
        found.append(weights(pipe))
        pipe.close()
        return torch.cat(found)

    assert torch.equal(trained(name), trained("gpipe"))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        return x + self.scale * self.second(torch.tanh(self.first(self.norm(x))))


class Twice(nn.Linear):
    """Its weights are used twice, the second time on what was computed with them."""

    def forward(self, x):
        return super().forward(torch.tanh(super().forward(x)))


class Beside(nn.Linear):
    """Its weights are used twice, side by side."""

    def forward(self, x):
        return super().forward(x) * torch.tanh(super().forward(x + 1))


class Penalised(nn.Module):
    """A second output depends on a weight, and not on the input."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.free = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.second(self.first(x)), 2 * self.free


class Tied(Penalised):
    def forward(self, x):
        return self.second(self.first(x)), 2 * self.first.weight


class Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Custom(nn.Linear):
    def forward(self, x):
        return Scanned.apply(super().forward(x))


class Hooked(nn.Linear):
    """A hook that its forward registers changes the gradient."""

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda gradient: 3 * gradient)
        return y


class Frozen(Residual):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


def listened():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    module[0].register_full_backward_hook(lambda m, given, gave: None)
    return module


@dataclass
class Model:
    make: object
    why: str = ""  # what keeps it whole


MODELS = {
    "residual": Model(Residual),
    "frozen": Model(Frozen),
    "attention": Model(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)),
    "layers": Model(lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)))),
    "convolution": Model(lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(True))),
    "weight norm": Model(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "side by side": Model(partial(Beside, 8, 8)),
    "free": Model(Penalised),
    "no weights": Model(nn.Tanh),
    "checkpointed": Model(lambda: Checkpointed(Residual(), nn.Dropout(0.2), Residual())),
    "twice": Model(partial(Twice, 8, 8), "a weight is used again on what was computed with it"),
    "tied": Model(Tied, "a weight is used again on what was computed with it"),
    "recurrent": Model(lambda: Recurrent(), "computes both at once|used again"),
    "custom": Model(partial(Custom, 8, 8), "Scanned is an autograd function of its own"),
    "hooked": Model(partial(Hooked, 8, 8), "its forward registered hooks"),
    "listened": Model(listened, "there are hooks on module '0'"),
}


class Checkpointed(nn.Sequential):
    """What its graph saves is computed again whenever a backward asks for it."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(8, 8, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_split_or_whole(name, threaded):
    """Gradients of weights and inputs, sums over micro-batches and their count; W in any distance from I."""
    torch.manual_seed(0)
    model = MODELS[name]
    one, other = (
        Stage(1, 3, model.make(), "it", methods.create("gpipe"), lambda p: torch.optim.SGD(p, 0.1)) for _ in range(2)
    )
    other.module.load_state_dict(one.module.state_dict())
    found = []
    for stage in (one, other):
        stage.gradients.share(threaded)
        torch.manual_seed(1)
        outputs = [stage.forward(i, torch.randn(4, 5, 8)) for i in range(4)]
        torch.manual_seed(2)
        gradients = [tuple(map(torch.randn_like, y)) if isinstance(y, tuple) else torch.randn_like(y) for y in outputs]
        if stage is one:
            upstream = [stage.backward(i, g) for i, g in enumerate(gradients)]
        else:
            upstream = []
            for i, g in enumerate(gradients):
                upstream.append(split_backward.of_input(stage, i, g))
                assert bool(stage.gradients.split.why) == bool(model.why) == (i not in stage.gradients.split.waiting)
                if i:
                    split_backward.of_weights(stage, i - 1)
            split_backward.of_weights(stage, 3)
            assert not stage.gradients.split.waiting
        found.append((upstream, stage.gradients.values, stage.gradients.count))
    for a, b in zip(found[0][0] + found[0][1], found[1][0] + found[1][1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert found[0][2] == found[1][2] == 4
    assert any(word in other.gradients.split.why for word in model.why.split("|")), other.gradients.split.why


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_the_work_is_divided():
    """W computes the gradients of the weights, and I does not: of four layers, each has four of the eight products."""
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8, bias=False), nn.Tanh())))
    stage = Stage(1, 3, module, "it", methods.create("gpipe"), lambda p: torch.optim.SGD(p, 0.1))
    gradient = torch.randn_like(stage.forward(0, torch.randn(16, 8)))
    with Products() as of_input:
        split_backward.of_input(stage, 0, gradient)
    with Products() as of_weights:
        split_backward.of_weights(stage, 0)
    assert (of_input.count, of_weights.count) == (4, 4)


class Alternating(nn.Module):
    """Its graphs have three forms in turn, one of which cannot be split."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            return Scanned.apply(self.first(x))
        return self.second(torch.tanh(self.first(x))) if self.calls % 3 == 1 else self.first(torch.tanh(self.second(x)))


def test_graphs_of_several_forms():
    """Each is cut where it is to be cut, though a form is searched once."""
    torch.manual_seed(0)
    one, other = (
        Stage(1, 3, Alternating(), "it", methods.create("gpipe"), lambda p: torch.optim.SGD(p, 0.1)) for _ in range(2)
    )
    other.module.load_state_dict(one.module.state_dict())
    for i in range(9):
        x, gradient = torch.randn(2, 4, 8)
        for stage in (one, other):
            stage.forward(i, x)
        wanted = one.backward(i, gradient)
        assert torch.equal(split_backward.of_input(other, i, gradient), wanted)
        assert bool(other.gradients.split.why) == (i % 3 == 2)
        split_backward.of_weights(other, i)
        for a, b in zip(one.gradients.values, other.gradients.values, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        assert len(other.gradients.split.forms.known) == min(i + 1, 3)


@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_added_in_order(late):
    """Where a backward that is not split comes while earlier ones wait for their W."""
    torch.manual_seed(0)
    one, other = (
        Stage(1, 3, Alternating(), "it", methods.create("gpipe"), lambda p: torch.optim.SGD(p, 0.1)) for _ in range(2)
    )
    other.module.load_state_dict(one.module.state_dict())
    other.gradients.split.begin(late)
    x, gradients = torch.randn(9, 4, 8), torch.randn(9, 4, 8)
    for stage in (one, other):
        for i in range(9):
            stage.forward(i, x[i])
    for i in range(9):
        one.backward(i, gradients[i])
    whole = 0
    for i in range(9):
        split_backward.of_input(other, i, gradients[i])
        whole += bool(other.gradients.split.why)
        if i >= 2:
            split_backward.of_weights(other, i - 2)
    for i in (7, 8):
        split_backward.of_weights(other, i)
    assert whole == 3
    for a, b in zip(one.gradients.values, other.gradients.values, strict=True):
        assert torch.equal(a, b)
    assert one.gradients.count == other.gradients.count == 9
