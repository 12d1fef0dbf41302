"""Law: what is set between pushes holds for stages that run as one, too, wherever their forward reads it."""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeback.stages.module_settings import Settings
from tests.laws.as_one import doubles, model
from tests.laws.cases import pipeline, weights

GAIN, TABLE = 1.25, {"by": 1.0}


class Kind(Enum):
    FULL, HALF = 1.0, 0.5


class Schedule:
    factor = 1.0

    def __init__(self):
        self._at = 1.0

    def __call__(self):
        return self._at * self.factor


@dataclass
class Config:
    power: float = 1.0
    unread: int = 0


class Reads(nn.Module):
    """Reads numbers wherever they may be."""

    shift, outside = 0.0, Schedule()

    def __init__(self, config):
        super().__init__()
        self.linear, self.config, self.schedule = nn.Linear(6, 6), config, Schedule()
        self.number, self._hidden, self.kind, self.act, self.sizes = 1.0, 2, Kind.FULL, F.tanh, (1, [1.0])
        self.table, self.half, self.complex = {"a": [{"b": 1.0}]}, np.float32(1.0), 1 + 0j
        self.space = SimpleNamespace(inner=SimpleNamespace(by=1.0))

    def forward(self, x):
        by = self.number * self._hidden * self.kind.value * self.sizes[1][0] * self.table["a"][0]["b"]
        by = by * float(self.half) * self.complex.real * self.space.inner.by * self.config.power * self.schedule()
        by = by * GAIN * TABLE["by"] * self.outside()
        return self.act(self.linear(x) * by) + self.shift


SETS = {
    "a number": lambda m: setattr(m, "number", 0.5),
    "a private one": lambda m: setattr(m, "_hidden", 1),
    "an enum": lambda m: setattr(m, "kind", Kind.HALF),
    "a function": lambda m: setattr(m, "act", F.relu),
    "a list in a tuple": lambda m: m.sizes[1].__setitem__(0, 2.0),
    "another tuple": lambda m: setattr(m, "sizes", (1, [1.0])),
    "in another tuple": lambda m: m.sizes[1].__setitem__(0, 0.5),
    "deep in place": lambda m: m.table["a"][0].update(b=1.5),
    "of numpy": lambda m: setattr(m, "half", np.float32(0.5)),
    "complex": lambda m: setattr(m, "complex", 2 + 0j),
    "an object in an object": lambda m: setattr(m.space.inner, "by", 0.75),
    "a dataclass": lambda m: setattr(m.config, "power", 1.5),
    "an equal dataclass": lambda m: setattr(m, "config", Config(1.5)),
    "in an equal dataclass": lambda m: setattr(m.config, "power", 0.5),
    "what an object reads": lambda m: setattr(m.schedule, "_at", 0.5),
    "what hides that of a class": lambda m: setattr(m.schedule, "factor", 1.5),
    "a class": lambda m: setattr(Reads, "shift", 0.25),
    "an object of a class": lambda m: setattr(Reads.outside, "_at", 1.25),
    "a variable": lambda m: globals().update(GAIN=0.75),
    "within a variable": lambda m: TABLE.update(by=1.5),
}


@pytest.fixture
def reset():
    yield
    globals().update(GAIN=1.25, TABLE={"by": 1.0})
    Reads.shift, Reads.outside = 0.0, Schedule()


@pytest.mark.usefixtures("deterministic", "reset")
def test_what_is_set_between_pushes():
    config = Config()
    pipes = [pipeline(model(make=lambda: Reads(config)), "pb", **options) for options in ({}, {"vectorize": True})]
    some = iter(doubles(3 * len(SETS)))
    for name, change in SETS.items():
        blocks = [m for pipe in pipes for m in pipe.model.modules() if isinstance(m, Reads)]
        for pipe in pipes:
            pipe.wait()
        before = weights(pipes[0])
        for block in blocks[:1] if name in ("a class", "an object of a class") else blocks:
            change(block)
        for _ in range(3):
            x, y = next(some)
            for pipe in pipes:
                pipe.push(x, y)
        torch.testing.assert_close(*map(weights, pipes), rtol=1e-9, atol=1e-9, msg=name)
        assert not torch.equal(before, weights(pipes[0]))
    assert pipes[1].vectorized["stages 1 … 5"].startswith("as one")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("method", ["pb", "gpipe"])
@pytest.mark.parametrize("name", ["a number", "a private one", "a function", "a dataclass"])
def test_what_is_set_in_the_stage_with_the_loss(method, name):
    pipes = []
    for options in ({}, {"vectorize": True}):
        built = model()
        built[-1] = Reads(Config()).double()
        built[-1].load_state_dict({"linear.weight": torch.eye(6), "linear.bias": torch.ones(6)})
        pipe = pipeline(built, method, micro_batch_size=3, **options)
        for n, (x, y) in enumerate(doubles(6, samples=18)):
            if n == 3:
                pipe.wait()
                SETS[name](built[-1])
            pipe.push(x, y)
        pipe.drain()
        pipes.append(pipe)
    torch.testing.assert_close(*map(weights, pipes), rtol=1e-9, atol=1e-9)


def test_what_no_forward_reads_is_no_change():
    block = Reads(Config())
    block.beside, block.log = SimpleNamespace(count=0), []
    settings = Settings([block], "all")
    block.beside.count, block.config.unread = 1, 1
    block.log.append(1)
    block.extra = Config()
    assert not settings.changed()
    block.number = torch.ones(2)
    assert settings.changed()


def test_what_holds_itself_is_not_looked_into():
    block = Reads(Config())
    block.table["a"].append(block.table)
    block.space.inner.inner = block.space
    assert not Settings([block], "all").changed()
