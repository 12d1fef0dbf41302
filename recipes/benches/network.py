"""The networks and settings that most sections use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeback
from pipeback import methods


def settle() -> None:
    """Set up a process that measures: one intra-op thread, and subnormal numbers flushed to zero.

    If a unit never fires, its momentum fades to subnormal numbers after some hundred steps, which slow processors down.
    In a deep narrow network this would slow all contenders, and those with the least overhead the most.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class Block(nn.Module):
    """x + relu(linear(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def network(stages: int = 20, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(stages - 1)], nn.Linear(width, 10))


def sgd(params: Any, fused: bool = False) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1e-5, momentum=0.999, weight_decay=1e-4, foreach=not fused, fused=fused)


def create(name: str, stages: int, **given: Any) -> pipeback.Method:
    """given: options of the method."""
    options: dict[str, dict[str, int]] = {
        "pipemare": {"anneal": 10_000}, "pipedream_2bw": {"micro_batches": stages},
        "gpipe": {"micro_batches": 32}, "one_f_one_b": {"micro_batches": 32},
        "interleaved": {"micro_batches": 32}, "looped_bfs": {"micro_batches": 32}, "zb_v": {"micro_batches": 32},
    }  # fmt: skip
    return methods.create(name, **options.get(name, {}) | given)


def pipeline(method: str | pipeback.Method, stages: int = 20, width: int = 64, **options: Any) -> pipeback.Pipeline:
    """method: a name, with the options of `create`, or a method."""
    chosen = create(method, stages) if isinstance(method, str) else method
    return pipeback.Pipeline(network(stages, width), loss=cross_entropy, optimizer=sgd, method=chosen, **options)
