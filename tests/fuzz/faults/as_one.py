"""Stages that run as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import Program
from tests.laws.cases import data

from .table import FAULTS, ONE, fault, layers, pipeline, train


def _as_one(told: str, **program: Any) -> None:
    FAULTS[f"vectorize crashes: {told}"] = Program(
        **{"stages": 4, "runtime": {"vectorize": True}, "calls": (("push", 2),) * 8, **program}
    )


_as_one("Linear and Tanh of a followed model", form="followed")
_as_one("depthwise convolutions", model="depthwise")
_as_one("a frozen weight", model="frozen", optimizer="momentum", calls=(("push", 2),) * 12)
_as_one("a change in place first", model="in place")


def _both(make: Callable[[], nn.Sequential], *shape_: int, samples: tuple[int, ...] = (2,) * 12) -> None:
    """Trained on (N, *shape) with and without: the same to rounding, and a state can be taken."""
    shape = torch.Size(shape_ or (6,))
    found = []
    for vectorize in (False, "auto"):
        pipe, some = pipeline(make().double(), vectorize=vectorize), []
        for n in samples:
            some.append(float(pipe.push(*(v.view(n, *shape) for v in data(1, n, shape.numel(), torch.float64)[0]))))
        found.append(some)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-10, atol=1e-10)
    pipe.state_dict()


def _convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(5)])


@fault("vectorize crashes: convolutions of two samples")
def _() -> None:
    _both(_convolutions, 2, 4, 4)


@fault("vectorize crashes: convolutions of one sample, then of two")
def _() -> None:
    _both(_convolutions, 2, 4, 4, samples=(1, 1, 1, 2, 2, 2, 2, 2))


@fault("vectorize crashes: group norms and convolutions")
def _() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.GroupNorm(1, 2), nn.Conv1d(2, 2, 3, padding=1)) for _ in range(5)])

    _both(make, 2, 4)


FAULTS["a followed model that is evaluated first trains without gradients in evaluation mode"] = Program(
    stages=4, form="followed", runtime={"vectorize": True}, calls=(("evaluate", 1), ("eval",), *ONE)
)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@fault("vectorize crashes: an unused weight")
def _() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Unused() for _ in range(5)])

    _both(make)


@fault("vectorize keeps memory for every form that ever came")
def _() -> None:
    pipe = pipeline(layers(5, 6, nn.Tanh), vectorize=True)
    for samples in range(1, 7):
        train(pipe, 9, samples)
    every = [rings.nbytes for stack in pipe._engine.setting.stacks for rings in stack._rings.values()]
    assert len(every) == 6 and sum(map(bool, every)) <= 3, every
