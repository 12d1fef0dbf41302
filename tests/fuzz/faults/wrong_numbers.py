"""Silently wrong numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeback
from tests.fuzz.program import Program
from tests.laws.cases import data

from .table import FAULTS, ONE, fault, layers, pipeline, train

FAULTS["an optimizer that counts in its groups: each joined twin counts for itself"] = Program(
    optimizer="counting", calls=ONE * 8
)
FAULTS["an optimizer that counts on itself"] = Program(optimizer="counter", calls=ONE * 8)
FAULTS["the counter of an optimizer is lost on the way through a state"] = Program(
    stages=1, optimizer="counting", calls=(*ONE * 3, ("reload",), *ONE * 3)
)
FAULTS["zero_grad before a push destroys sums of 2BW"] = Program(
    stages=1, method="2bw-S+1", calls=(*ONE, ("zero_grad",), ("drain",))
)
FAULTS["zero_grad before a push destroys sums of 1F1B"] = Program(
    method="one_f_one_b-2", calls=(*ONE, ("zero_grad",), *ONE)
)
FAULTS["zero_grad before a push destroys sums of PipeMare"] = Program(
    method="pipemare-groups", calls=(*ONE, ("zero_grad",)) * 12
)
FAULTS["a backward of the user's comes into sums of 2BW"] = Program(
    stages=1, method="2bw-S+1", calls=(*ONE, ("own_backward",), ("drain",))
)


class Gate(nn.Module):
    """Waits for somebody to open it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.open.wait(5.0)
        return x


@fault("eval() between pushes with workers takes effect at a random time")
def _() -> None:
    found = []
    for workers in (None, 2):
        torch.manual_seed(0)
        gate = Gate()
        model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), gate), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
        pipe = pipeline(model, workers=workers)
        train(pipe, 1)
        if workers:
            gate.open.clear()
        ((x, y),) = data(1, seed=2)
        loss = pipe.push(x, y)
        opener = threading.Timer(0.2, gate.open.set)  # where eval() waits for what was pushed
        opener.start()
        model.eval()
        gate.open.set()
        found.append(float(loss))
        opener.join()
        pipe.close()
    assert found[0] == found[1]


@fault("a replaced parameter is not noticed where a push has two micro-batches")
def _() -> None:
    pipe = pipeline(layers(), "sgd", micro_batch_size=2)
    train(pipe, 2, 4)
    pipe._engine.model[1][0].bias = nn.Parameter(torch.zeros(6))
    with pytest.raises((ValueError, RuntimeError), match="bias"):
        train(pipe, 4, 4)


@fault("methods that step themselves never call a subclass's step")
def _() -> None:
    class Mine(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            Mine.steps += 1
            super().step()

    try:
        train(pipeline(layers(), "cerebras", lambda ps: Mine(ps, lr=0.05, momentum=0.9)), 12)
    except ValueError as error:
        assert "step" in str(error)
    else:
        assert Mine.steps


@fault("methods that step themselves never call step hooks")
def _() -> None:
    pipe, heard = pipeline(layers(), "cerebras"), []
    pipe.optimizers[1].register_step_post_hook(lambda *given: heard.append(1))
    train(pipe, 12)
    assert heard


def _alike(**options: Any) -> pipeback.Pipeline:
    pipe = pipeline(layers(5, 6, nn.Tanh), vectorize=True, **options)
    train(pipe, 12)
    assert any(told.startswith("as one") for told in pipe.vectorized.values())
    return pipe


@fault("stages that run as one ignore forward hooks that are added later")
def _() -> None:
    pipe, heard = _alike(), []
    pipe.model[2].register_forward_hook(lambda *given: heard.append(1))
    _heard_or_refused(pipe, heard)


@fault("stages that run as one ignore hooks on gathered gradients")
def _() -> None:
    pipe, heard = _alike(), []
    pipe.model[2][0].weight.register_post_accumulate_grad_hook(lambda p: heard.append(1))
    _heard_or_refused(pipe, heard)


def _heard_or_refused(pipe: pipeback.Pipeline, heard: list[int]) -> None:
    try:
        train(pipe, 12)
    except (ValueError, RuntimeError) as error:
        assert "hook" in str(error)
    else:
        assert heard


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(6, 6, bias=False), by
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.by


@fault("in bfloat16, stages that run as one are taken for alike although their constants differ")
def _() -> None:
    found = []
    for vectorize in (False, "auto", True):
        model = nn.Sequential(*[Scaled(1.036 if s % 2 else 1.0) for s in range(10)]).bfloat16()
        options: dict[str, Any] = dict(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), loss=lambda o, y: o.mean())
        try:
            pipe = pipeline(model, vectorize=vectorize, **options)
            x = torch.ones(4, 6, dtype=torch.bfloat16)
            found.append(float(pipe.push(x, x)))
        except ValueError as error:
            assert "as one" in str(error)
    assert max(found) - min(found) < 0.03 * max(found), found


class Weighed(nn.Module):
    """Saves a function of its weights, when it is told to."""

    def __init__(self, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(6, 6), when

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.linear.weight) if self.when(x) else self.linear.weight
        return F.linear(x, weight, self.linear.bias)


def _known_or_refused(train_on: Callable[[bool], list[float]]) -> None:
    """What the guard meets late is refused, or trains as where it is met first. train_on: losses; whether it is."""
    try:
        late = train_on(False)
    except ValueError as error:
        assert "function of" in str(error) or "autocast" in str(error)
    else:
        assert late == train_on(True)


@fault("autocast that is entered after the first push evades the guard against functions of weights")
def _() -> None:
    def losses(first: bool) -> list[float]:
        pipe = pipeline(layers())
        if first:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.plan(*data(1)[0])
        train(pipe)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(pipe, 12)

    _known_or_refused(losses)


@fault("another shape evades the guard against functions of weights")
def _() -> None:
    def losses(first: bool) -> list[float]:
        torch.manual_seed(0)
        pipe = pipeline(nn.Sequential(Weighed(lambda x: len(x) > 4), nn.Linear(6, 6)))
        if first:
            pipe.plan(*data(1, 5)[0])
        train(pipe)
        return train(pipe, 12, samples=5)

    _known_or_refused(losses)


@fault("integer input evades the guard against functions of weights")
def _() -> None:
    class Looked(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x.flatten(), self.weight) @ torch.tanh(self.weight.T[:, :4])

    def losses(flat: bool) -> list[float]:
        torch.manual_seed(0)
        pipe, x, y = (
            pipeline(nn.Sequential(Looked(6, 6), nn.Linear(4, 6))),
            torch.tensor([[1], [3], [0]]),
            data(1)[0][1],
        )
        return [float(pipe.push(x.flatten() if flat else x, y)) for _ in range(12)]

    _known_or_refused(losses)


@fault("replicas of a model with init= begin with other weights")
def _() -> None:
    model = nn.Sequential(*[nn.Linear(6, 6, device="meta") for _ in range(2)])

    generator = torch.Generator().manual_seed(0)

    def init(module: nn.Module) -> None:
        for p in module.parameters():
            p.normal_(generator=generator)

    pipe = pipeline(model, "sgd", replicas=2, store=pipeback.Streaming(init=init))
    first, second = pipe._engine.holding.everywhere
    assert all(torch.equal(a, b) for s, t in zip(first, second) for a, b in zip(s.weights, t.weights))
