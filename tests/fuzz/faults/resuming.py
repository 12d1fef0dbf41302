"""States, and what the first micro-batch decides."""

from __future__ import annotations

import random
import sys
import time
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeback
from tests.laws.cases import data

from .table import fault, layers, pipeline, train, weights


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


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


def _like_plain_training(resumed: bool) -> None:
    """A first micro-batch of one sample tells nothing of how gradients lie. resumed: a state is taken after it."""
    for width, samples in ((37, 7), (64, 16), (64, 33)):

        def made(width: int = width) -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(width, width), nn.Tanh(), Turned(), nn.Linear(width, width))

        pipe, plain = pipeline(made(), "sgd"), made()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        for n, (x, y) in enumerate(data(1, 1, width) + data(4, samples, width)):
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
            pipe.push(x, y)
            if resumed:
                state = pipe.state_dict()
                pipe = pipeline(made(), "sgd")
                pipe.load_state_dict(state)
            for ours, theirs in zip(pipe.model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), (width, samples, n)


@fault("after one sample, gradients of a transposed output have other last bits than plain training")
def _() -> None:
    _like_plain_training(False)


@fault("after one sample, a run that is resumed has other last bits")
def _() -> None:
    _like_plain_training(True)


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


@fault("what a state takes to load grows with the cube of the stages")
def _() -> None:
    # calls are counted, of C functions, too; twice the stages have four times as much in flight
    counts = []
    for stages in (16, 32):
        pipe, calls = pipeline(layers(stages, 2)), [0]
        train(pipe, 2 * stages + 2, 1, width=2)
        state, other = pipe.state_dict(), pipeline(layers(stages, 2))

        def count(*_: object, calls: list[int] = calls) -> None:
            calls[0] += 1

        sys.setprofile(count)
        try:
            other.load_state_dict(state)
        finally:
            sys.setprofile(None)
        counts.append(calls[0])
    assert counts[1] < 4.1 * counts[0], counts  # the looks at names, of which the cube is made, are few among these
