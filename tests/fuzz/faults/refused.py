"""Refused or raised wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.laws.cases import data

from .table import fault, layers, pipeline, train


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
