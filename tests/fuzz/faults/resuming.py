"""States, and what the first micro-batch decides."""

from __future__ import annotations

import random
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


@fault("after one sample, gradients of a transposed output have other last bits than plain training")
def _() -> None:
    for width, samples in ((37, 7), (64, 16), (64, 33)):
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), Turned(), nn.Linear(width, width)) for _ in range(2)
        ]
        models[1].load_state_dict(models[0].state_dict())
        pipe, optimizer = pipeline(models[0], "sgd"), torch.optim.SGD(models[1].parameters(), lr=0.05, momentum=0.9)
        for n, (x, y) in enumerate(data(1, 1, width) + data(4, samples, width)):
            optimizer.zero_grad()
            loss = F.mse_loss(models[1](x), y)
            loss.backward()
            optimizer.step()
            pipe.push(x, y)
            for ours, theirs in zip(pipe.model.parameters(), models[1].parameters(), strict=True):
                assert torch.equal(ours, theirs), (width, samples, n)


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
