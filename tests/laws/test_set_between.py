"""Law: what a forward goes by in attributes of its modules, whoever sets it between pushes, holds from then on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.laws.cases import data, pipeline


class Sub(nn.Module):
    """Nobody keeps it whole: its forward is followed."""

    shift = 0.0

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.kind, self.flag, self._hidden = 1.5, "tanh", True, 1
        self.sizes, self.table, self.act = (1, 2.0), {"a": 1.0}, F.relu

    def forward(self, x):
        x = self.act(self.a(x) * self.scale * self.table["a"] * self.sizes[1] + self.shift) * self._hidden
        x = x * 2 if self.training else x
        x = torch.tanh(x) if self.kind == "tanh" else torch.relu(x)
        return self.b(x) if self.flag else self.b(x) + 1


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
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"replicas": 2}], ids=str)
def test_what_a_followed_forward_goes_by(options):
    """Bit for bit what the plain model computes; where two replicas share a batch, to the last bits."""
    made, plain = Model().double(), Model().double()
    some = iter(data(40, samples=4, dtype=torch.float64))
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
