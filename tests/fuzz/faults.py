"""Faults that a search over options once found, each as the smallest thing that shows it.

A `Program` is checked as the fuzzer checks it; a function raises where the fault is there. What may rightly be refused
is either right or refused with an error that says so, never silent.
"""

from __future__ import annotations

import os
import random
import select
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeback
from tests.laws.cases import data

from .program import Program

Fault = Program | Callable[[], None]
FAULTS: dict[str, Fault] = {}
ONE = (("push", 1),)


def fault(told: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Take a function into the table."""

    def keep(show: Callable[[], None]) -> Callable[[], None]:
        FAULTS[told] = show
        return show

    return keep


def layers(count: int = 4, width: int = 6, *between: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), *(make() for make in between)) for _ in range(count)])


def pipeline(model: Any, method: Any = "pb", optimizer: Any = None, **options: Any) -> pipeback.Pipeline:
    options.setdefault("loss", F.mse_loss)
    made = optimizer or (lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9))
    return pipeback.Pipeline(model, optimizer=made, method=method, **options)


def train(pipe: pipeback.Pipeline, count: int = 4, samples: int = 3, seed: int = 1) -> list[float]:
    losses = [pipe.push(x, y) for x, y in data(count, samples, seed=seed)]
    return [float(loss) for loss in losses]


def weights(pipe: pipeback.Pipeline) -> Tensor:
    return torch.cat([w.detach().flatten() for w in pipe.model.state_dict().values()])


# -- silently wrong numbers ------------------------------------------------------------------------------------------

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
    pipe._model[1][0].bias = nn.Parameter(torch.zeros(6))
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


@fault("autocast that is entered after the first push evades the guard against functions of weights")
def _() -> None:
    pipe = pipeline(layers())
    train(pipe)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="function of|autocast"):
        train(pipe)


@fault("another shape evades the guard against functions of weights")
def _() -> None:
    pipe = pipeline(nn.Sequential(Weighed(lambda x: len(x) > 4), nn.Linear(6, 6)))
    train(pipe)
    with pytest.raises(ValueError, match="function of"):
        train(pipe, samples=5)


@fault("integer input evades the guard against functions of weights")
def _() -> None:
    class Looked(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x.flatten(), self.weight) @ torch.tanh(self.weight.T[:, :4])

    pipe = pipeline(nn.Sequential(Looked(6, 6), nn.Linear(4, 6)))
    with pytest.raises(ValueError, match="function of"):
        pipe.push(torch.tensor([[1], [3], [0]]), torch.randn(3, 6))


@fault("replicas of a model with init= begin with other weights")
def _() -> None:
    model = nn.Sequential(*[nn.Linear(6, 6, device="meta") for _ in range(2)])

    generator = torch.Generator().manual_seed(0)

    def init(module: nn.Module) -> None:
        for p in module.parameters():
            p.normal_(generator=generator)

    pipe = pipeline(model, "sgd", replicas=2, init=init)
    first, second = pipe._holding.everywhere
    assert all(torch.equal(a, b) for s, t in zip(first, second) for a, b in zip(s.weights, t.weights))


# -- resume ----------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@fault("stages=N is cut by measured time, so that a state is refused as another model's")
def _() -> None:
    def made(seed: int) -> pipeback.Pipeline:
        clock, now = random.Random(seed), [0.0]

        def tick() -> float:
            now[0] += clock.random() ** 8
            return now[0]

        with mock.patch.object(time, "perf_counter", tick):
            return pipeline(Branching(), stages=3, example=torch.randn(3, 6))

    first = made(1)
    train(first)
    state = first.state_dict()
    for seed in range(2, 8):
        made(seed).load_state_dict(state)


class Transposed(nn.Module):
    """A linear layer whose output lies in memory by columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear.weight @ x.t()).t() + self.linear.bias


@fault("after one sample, gradients of a transposed output have other last bits than plain training")
def _() -> None:
    for width in (16, 24, 33):
        torch.manual_seed(width)
        made = lambda: nn.Sequential(*[Transposed(width) for _ in range(3)])  # noqa: E731, B023
        model, plain = made(), made()
        plain.load_state_dict(model.state_dict())
        pipe, optimizer = pipeline(model, "sgd"), torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        for n, (x, y) in enumerate(data(1, 1, width) + data(7, 16, width)):
            optimizer.zero_grad()
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            optimizer.step()
            assert torch.equal(pipe.push(x, y), loss.detach()), (width, n)


@fault("a stage that begins to draw after the first push has no stream of its own")
def _() -> None:
    model = layers(3, 6, lambda: nn.Dropout(0.0))
    pipe = pipeline(model)
    train(pipe)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    before = torch.get_rng_state()
    train(pipe)
    assert torch.equal(before, torch.get_rng_state())


@fault("a state of a model with other frozen weights is found out after weights have changed")
def _() -> None:
    model = layers()
    model[1][0].bias.requires_grad_(False)
    other = pipeline(model)
    train(other)
    pipe = pipeline(layers())
    train(pipe, seed=2)
    before = weights(pipe)
    with pytest.raises(ValueError, match="stage 1"):
        pipe.load_state_dict(other.state_dict())
    assert torch.equal(weights(pipe), before)


# -- stages that run as one ------------------------------------------------------------------------------------------


def _as_one(told: str, **program: Any) -> None:
    FAULTS[f"vectorize crashes: {told}"] = Program(
        **{"stages": 4, "runtime": {"vectorize": True}, "calls": (("push", 2),) * 8, **program}
    )


_as_one("Linear and Tanh of a followed model", form="followed")
_as_one("depthwise convolutions", model="depthwise")


def _both(make: Callable[[], nn.Sequential], *shape_: int, samples: tuple[int, ...] = (2,) * 8) -> None:
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
    torch.manual_seed(0)
    _both(lambda: nn.Sequential(*[nn.Sequential(nn.GroupNorm(1, 2), nn.Conv1d(2, 2, 3, padding=1)) for _ in range(5)]),
          2, 4)  # fmt: skip


@fault("vectorize crashes: a frozen weight")
def _() -> None:
    def make() -> nn.Sequential:
        model = layers(5, 6, nn.Tanh)
        for stage in model:
            stage[0].bias.requires_grad_(False)
        return model

    _both(make)


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


@fault("vectorize crashes: a change in place first")
def _() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(5)])

    _both(make)


# -- refused or raised wrongly ---------------------------------------------------------------------------------------


@fault("narrow layers with ReLU at one sample are refused as functions of their weights")
def _() -> None:
    for width in (1, 2, 3, 4):
        for seed in range(12):
            torch.manual_seed(seed)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])
            pipe = pipeline(model)
            for x, y in data(3, 1, width, seed=seed):
                pipe.push(x, y)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(input=self.norm(input=x))


@fault("modules that are called by keyword")
def _() -> None:
    train(pipeline(nn.Sequential(Named(), Named())))


@fault("a loss that differentiates")
def _() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(F.mse_loss(output, y), output, create_graph=True)
        return F.mse_loss(output, y) + slope.square().sum()

    train(pipeline(layers(), loss=loss))


@fault("an expanded buffer")
def _() -> None:
    model = layers()
    model[1].register_buffer("mask", torch.ones(1, 6).expand(3, 6))
    pipe = pipeline(model)
    train(pipe)
    pipe.load_state_dict(pipe.state_dict())
    train(pipe)


def _sparse(**options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = pipeline(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), **options)
    try:
        for _ in range(6):
            pipe.push(torch.tensor([1, 3, 0, 1]), torch.randn(4, 6))
        pipe.wait()
    except (ValueError, TypeError) as error:
        assert "sparse=False" in str(error)


@fault("sparse gradients in a small model")
def _() -> None:
    _sparse()


@fault("sparse gradients with replicas")
def _() -> None:
    _sparse(replicas=2)


# -- process life ----------------------------------------------------------------------------------------------------


@fault("one bad batch closes the pipeline for good")
def _() -> None:
    pipe, plain = pipeline(layers()), pipeline(layers())
    for p in (pipe, plain):
        train(p)
    for bad in (torch.randn(3, 5), torch.randn(3, 6, dtype=torch.float64)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            pipe.push(bad, torch.randn(3, 6))
    assert train(pipe, seed=2) == train(plain, seed=2)


@fault("KeyboardInterrupt closes the pipeline with an empty message")
def _() -> None:
    stop = [False]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if stop[0]:
            raise KeyboardInterrupt
        return F.mse_loss(output, y)

    pipe = pipeline(layers(), loss=loss)
    train(pipe)
    stop[0] = True
    with pytest.raises(KeyboardInterrupt):
        train(pipe)
    stop[0] = False
    try:
        train(pipe)
    except RuntimeError as error:
        assert "KeyboardInterrupt" in str(error)


@fault("after optimizer.state.clear() cerebras predicts from the old velocity")
def _() -> None:
    found = []
    for clear in (True, False):
        pipe = pipeline(layers(), "cerebras")
        train(pipe, 12)
        for optimizer in pipe.optimizers:
            if clear:
                optimizer.state.clear()
            else:
                for state in optimizer.state.values():
                    state["momentum_buffer"].zero_()
        found.append(train(pipe, seed=2))
    assert found[0] == found[1]


@fault("load_state_dict of the model in flight ends in an autograd error")
def _() -> None:
    pipe = pipeline(layers())
    train(pipe, 12)
    pipe.model.load_state_dict(layers().state_dict())
    train(pipe, 12)


@fault("a forked child that pushes hangs")
def _() -> None:
    pipe = pipeline(layers(), workers=2)
    train(pipe)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            train(pipe)
        except RuntimeError:
            pass
        finally:
            os.write(tell, b"done")
            os._exit(0)
    try:
        ready, _, _ = select.select([told], [], [], 2.0)
        assert ready, "nothing came from the child"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
        pipe.close()


# -- files -----------------------------------------------------------------------------------------------------------


@fault("a store whose last version is missing begins at zero without a word")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = pipeline(layers(), store=f"disk:{folder}")
        train(pipe)
        pipe.commit()
        pipe.close()
        for version in Path(folder).rglob("version-*.json"):
            version.unlink()
        with pytest.raises(RuntimeError, match="version"):
            pipeline(layers(), store=f"disk:{folder}")


# -- options ---------------------------------------------------------------------------------------------------------


@fault("skip_zeros without sparsity is accepted without effect")
def _() -> None:
    with pytest.raises(ValueError, match="skip_zeros"):
        pipeline(layers(), skip_zeros=True)


@fault("a balance that is none is accepted")
def _() -> None:
    with pytest.raises(ValueError, match="balance"):
        pipeline(layers(), balance="luck")


@fault("a check_finite that is none is accepted")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="check_finite"):
        pipeline(layers(), check_finite="x")


@fault("a store that is none is an AttributeError")
def _() -> None:
    with pytest.raises((TypeError, ValueError), match="store"):
        pipeline(layers(), store=5)


@fault("momentum 1 divides by zero in the spike")
def _() -> None:
    with pytest.raises(ValueError, match="momentum"):
        train(pipeline(layers(), "sc", lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=1.0)), 12)


# -- fused optimizers ------------------------------------------------------------------------------------------------

FAULTS["joined stages of other histories, with fused momentum SGD"] = Program(optimizer="fused-momentum", calls=ONE * 8)
