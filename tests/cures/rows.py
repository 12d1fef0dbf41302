"""What goes wrong, what is said, and the cure: a row of the tables of this folder, and what rows are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import pipeback
from pipeback import methods
from tests.laws.cases import data, network


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def build(model: Any = None, **options: Any) -> pipeback.Pipeline:
    given = {"loss": mse_loss, "optimizer": sgd, "method": "pb", **options}
    return pipeback.Pipeline(network(4) if model is None else model, **given)


def train(pipe: pipeback.Pipeline, samples: int = 4) -> None:
    for x, y in data(3, samples):
        if pipe._engine.outside:
            output = pipe.forward(x)
            pipe.backward(torch.ones_like(output))
            pipe.step()
        else:
            float(pipe.push(x, y))
    pipe.wait()
    pipe.close()


def trains(**options: Any) -> None:
    samples = options.pop("samples", 4)
    train(build(**options), samples)


def refused(what: Callable[[], Any], says: str) -> str:
    """The message with which it is refused."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as found:
        what()
    told = str(found.value)
    assert re.search(says, told, re.DOTALL), told
    return told


class Row(NamedTuple):
    broken: Callable[[], Any]
    says: str
    cured: Callable[[], Any]


def pushed(x: Any, y: Any, **options: Any) -> Callable[[], Any]:
    return lambda: build(**options).push(x, y)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def momentum(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, **{"lr": 0.01, "momentum": 0.9, **options})


def weight_form() -> Any:
    return methods.create("lwp", form="weight")


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.linear.weight @ self.linear.weight, self.linear.bias)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return x + self.b(self.a(x).tanh())


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: Any) -> Any:
        return self.linear(pair[0] + pair[1])


def functions(**options: Any) -> Callable[[], Any]:
    return lambda: trains(model=nn.Sequential(nn.Linear(6, 6), Biased(), nn.Linear(6, 6)), **options)


def shared(tied: bool) -> nn.Module:
    one = nn.Linear(6, 6)
    return nn.Sequential(nn.Sequential(one, nn.Tanh(), one), nn.Linear(6, 6)) if tied else nn.Sequential(one, one)


def frozen(how: bool) -> nn.Module:
    return network(2).requires_grad_(how)


def outside(call: str, *first: str, give: int = 1) -> Callable[[], Any]:
    """forward and the like, for a loss outside."""

    def do() -> None:
        pipe = build(loss=None, method="gpipe")
        for name in (*first, call):
            if name == "forward":
                pipe.forward(torch.randn(4, 6))
            elif name == "backward":
                pipe.backward(torch.ones(4, 6))
            elif name == "backward_many":
                pipe.backward_many([torch.ones(4, 6)] * give)
            else:
                getattr(pipe, name)()

    return do


def loads(into: dict[str, Any], **source: Any) -> Callable[[], Any]:
    """A state of a pipeline, loaded into another one, which trains on."""

    def do() -> None:
        pipe = build(**source)
        for x, y in data(3, 4):
            pipe.push(x, y)
        saved = pipe.state_dict()
        pipe.close()
        other = build(**into)
        before = [p.detach().clone() for p in other._engine.model.parameters()]
        try:
            other.load_state_dict(saved)
        except ValueError:
            after = [p.detach() for p in other._engine.model.parameters()]  # NaN where weights live elsewhere
            assert all(a.equal(b) or a.isnan().all() for a, b in zip(before, after)), "half a state was taken up"
            raise
        train(other)

    return do


lazy = lambda run: (lambda m: (m(torch.randn(2, 6)) if run else None, m)[1])(nn.Sequential(nn.LazyLinear(6)))  # noqa: E731
BATCH = torch.randn(4, 6)


def inferring(what: Callable[[], Any] | None) -> Callable[[], Any]:
    def do() -> None:
        pipe = build()
        with torch.inference_mode():
            pipe.push(BATCH, BATCH) if what is None else what()

    return do


@dataclass
class Answer:
    loss: Any
    logits: Any


class Judges(nn.Module):
    """Computes its loss itself if it is given labels, as models of transformers do."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        logits = self.head(self.body(x).relu())
        return self.kind(loss=None if labels is None else cross_entropy(logits, labels), logits=logits)


LABELLED = {"x": BATCH, "labels": BATCH.argmax(1)}


def judged(x: Any, y: Any = None, kind: Any = Answer, **options: Any) -> Callable[[], Any]:
    return lambda: build(Judges(kind), stages="layer", example=x, **options).push(x, y)
