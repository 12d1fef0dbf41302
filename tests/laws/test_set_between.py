"""Law: what a forward goes by in attributes of its modules, whoever sets it between pushes, holds from then on."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeback import Pipeline
from tests.laws.cases import data, network, pipeline, weights

GAIN, TABLE = 1.25, {"by": 1.0}


def gained(x):
    return x * GAIN


class Sub(nn.Module):
    """Nobody keeps it whole: its forward is followed."""

    shift = 0.0

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.kind, self.flag, self._hidden = 1.5, "tanh", True, 1
        self.sizes, self.table, self.act = (1, 2.0), {"a": 1.0}, F.relu
        self.config = SimpleNamespace(power=1, inner=SimpleNamespace(by=1.0), unread=0)
        self.nested = {"a": [{"b": 1.0}]}
        self.register_buffer("alpha", torch.ones(()))  # both layers are multiplied by it, in two stages
        self.offset, self.offsets = torch.zeros(6), [torch.zeros(6)]

    def forward(self, x):
        x = self.act(self.a(x) * self.scale * self.table["a"] * self.sizes[1] + self.shift) * self._hidden
        x = x * 2 if self.training else x
        x = gained(x) * self.config.power * self.config.inner.by * self.nested["a"][0]["b"] * TABLE["by"]
        x = x * self.alpha + self.offset + self.offsets[0]
        x = torch.tanh(x) if self.kind == "tanh" else torch.relu(x)
        return self.b(x) * self.alpha if self.flag else self.b(x) + 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sub, self.last = nn.Linear(6, 6), Sub(), nn.Linear(6, 6)
        self.pushes = 0

    def forward(self, x):
        return self.last(self.sub(self.first(x)))


SETS = {
    "eval": lambda sub: sub.eval(),
    "train": lambda sub: sub.train(),
    "training": lambda sub: setattr(sub, "training", False),
    "train again": lambda sub: sub.train(),
    **{
        f"{key} = {value}": lambda sub, key=key, value=value: setattr(sub, key, value)
        for key, values in {
            "scale": (0.3, 1.5, 0.3), "kind": ("relu", "tanh"), "flag": (False, True), "_hidden": (3, 1),
            "sizes": ((1, 3.0), (1, 2.0)), "table": ({"a": 2.0},), "act": (F.silu, F.relu), "shift": (0.5, 0.0),
        }.items()
        for value in values
    },
    "in place": lambda sub: sub.table.update(a=3.0),
    "an object's attribute": lambda sub: setattr(sub.config, "power", 2),
    "that of an object in it": lambda sub: setattr(sub.config.inner, "by", 0.5),
    "another object": lambda sub: setattr(sub, "config", SimpleNamespace(power=3, inner=SimpleNamespace(by=1.5))),
    "deep in place": lambda sub: sub.nested["a"][0].update(b=0.5),
    "a variable": lambda sub: globals().update(GAIN=0.75),
    "within a variable": lambda sub: TABLE.update(by=1.5),
    "a buffer": lambda sub: sub.alpha.fill_(0.5),
    "a buffer again": lambda sub: sub.alpha.mul_(3),
    "a buffer once more": lambda sub: sub.alpha.mul_(0.25),
    "nothing": lambda sub: None,
    "another tensor as a buffer": lambda sub: setattr(sub, "alpha", torch.full_like(sub.alpha, 0.75)),
    "a buffer that was replaced": lambda sub: sub.alpha.add_(0.125),
    "another tensor": lambda sub: setattr(sub, "offset", torch.full_like(sub.offset, 0.25)),
    "an equal tensor, written into": lambda sub: (setattr(sub, "offset", sub.offset.clone()), sub.offset.add_(1.0)),
    "another tensor in a list": lambda sub: sub.offsets.__setitem__(0, torch.ones_like(sub.offsets[0])),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"replicas": 2}], ids=str)
def test_what_a_followed_forward_goes_by(options):
    """Bit for bit what the plain model computes; where two replicas share a batch, to the last bits."""
    made, plain = Model().double(), Model().double()
    globals().update(GAIN=1.25, TABLE={"by": 1.0})
    some = iter(data(60, samples=4, dtype=torch.float64))
    opt = torch.optim.SGD(plain.parameters(), lr=0.05)
    example = data(1, samples=2 if "replicas" in options else 4, dtype=torch.float64)[0][0]
    pipe = pipeline(made, "sgd", "sgd", example=example, stages="layer", **options)
    for name, change in SETS.items():
        pipe.wait()
        change(made.sub)
        change(plain.sub)
        x, y = next(some)
        loss = F.mse_loss(plain(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        found = pipe.push(x, y).detach()
        with torch.no_grad():
            modes = [m.training for m in plain.modules()]
            plain.eval()
            expected = plain(x)
            for module, mode in zip(plain.modules(), modes, strict=True):
                module.training = mode
        evaluated = pipe.evaluate(x)
        if "replicas" in options:
            torch.testing.assert_close(found, loss.detach(), msg=name)
            torch.testing.assert_close(evaluated, expected, msg=name)
        else:
            assert torch.equal(found, loss.detach()), name
            assert torch.equal(evaluated, expected), name
    pipe.close()


def test_what_no_forward_reads_is_not_looked_at(monkeypatch):
    """A count that the user keeps in the model has nothing followed anew, and nor does what has been there."""
    made, (x, y) = Model(), data(1)[0]
    pipe = pipeline(made, "pb", "sgd", example=x, stages="layer")
    follows = []
    original = type(pipe._engine.traced).prepare
    monkeypatch.setattr(type(pipe._engine.traced), "prepare", lambda *args: follows.append(1) or original(*args))
    for _ in range(3):
        made.pushes += 1
        pipe.push(x, y)
    assert not follows
    for n in range(4):
        made.sub.scale = 1.5 + n % 2
        pipe.push(x, y)
    assert len(follows) == 1
    made.sub.eval()
    for _ in range(12):  # nothing is in flight that was pushed before
        pipe.push(x, y)
    other = Model()
    other.sub.scale = made.sub.scale
    other.sub.eval()
    again = pipeline(other, "pb", "sgd", example=x, stages="layer")
    again.load_state_dict(pipe.state_dict())
    assert torch.equal(again.push(x, y), pipe.push(x, y))


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("method", ["sgd", "pb"])
def test_a_buffer_of_several_stages_after_a_state(method, options):
    """A state has it once; all stages that read it have its value after it was loaded."""
    batches = data(12, samples=4)
    pipes = []
    for value in (0.25, 1.0):
        made = Model()
        made.sub.alpha.fill_(value)
        pipes.append(pipeline(made, method, "sgd", example=batches[0][0], stages="layer", **options))
    first, second = pipes
    for x, y in batches[:6]:
        first.push(x, y)
    second.load_state_dict(first.state_dict())
    for x, y in batches[6:]:
        assert torch.equal(first.push(x, y), second.push(x, y))
    for pipe in pipes:
        pipe.close()


def test_a_buffer_of_another_shape_is_refused():
    made, (x, y) = Model(), data(1)[0]
    pipe = pipeline(made, "pb", "sgd", example=x, stages="layer")
    pipe.push(x, y)
    made.sub.alpha = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"buffer 'sub.alpha' .*, torch.float32 \(\), was replaced by .*\(3,\)"):
        pipe.push(x, y)


class Chained(nn.Module):
    """Four layers, of which any may be frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("method", ["sgd", "gpipe"])
def test_a_form_that_comes_first_while_layers_are_frozen(method, options):
    """They train once they are no longer frozen, for micro-batches of this form, too."""
    made, plain = Chained().double(), Chained().double()
    opt = torch.optim.SGD(plain.parameters(), lr=0.05)
    pipe = pipeline(made, method, "sgd", example=data(1, dtype=torch.float64)[0][0], stages="layer", **options)
    for n in range(8):
        x, y = data(1, samples=4 + 2 * (n % 2), dtype=torch.float64, seed=n)[0]
        pipe.wait()
        for model in (made, plain):
            model.layers[:2].requires_grad_(n not in (1, 2, 5))
        opt.zero_grad()
        F.mse_loss(plain(x), y).backward()
        opt.step()
        pipe.push(x, y)
    pipe.drain()
    for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0 if not options else 1e-12, atol=0 if not options else 1e-12, msg=name)


@pytest.mark.filterwarnings("error:a weight or a buffer was written into")
@pytest.mark.parametrize("waits", [Pipeline.wait, None], ids=["wait", "read"])
def test_weights_written_into_in_place(waits):
    """Stages that run as one warn where work of earlier pushes was left, which runs on the new values."""
    found = []
    for options in ({}, {"vectorize": True}):
        model = network(5, dtype=torch.float64)
        pipe = pipeline(model, "pb", **options)
        for x, y in data(8, samples=4, dtype=torch.float64):
            loss = pipe.push(x, y)
            waits(pipe) if waits else float(loss)
            with torch.no_grad():
                model[2][0].weight.mul_(0.9)
        pipe.push(x, y)
        pipe.drain()
        found.append(weights(pipe))
        pipe.push(x, y)
        with torch.no_grad():
            model[2][0].weight.mul_(0.9)
        with pytest.warns(match=r"call pipe\.wait\(\) before it is written into") if options else nullcontext():
            pipe.push(x, y)
        pipe.close()
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
