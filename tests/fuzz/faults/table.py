"""The table of faults that a search over options once found, each with the smallest thing that shows it.

A `Program` is checked as the fuzzer checks it; a function raises where the fault is there. What may rightly be refused
is either right or refused with an error that says so, never silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeback
from tests.fuzz.program import Program
from tests.laws.cases import data

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


def train(pipe: pipeback.Pipeline, count: int = 4, samples: int = 3, width: int = 6, seed: int = 1) -> list[float]:
    losses = [pipe.push(x, y) for x, y in data(count, samples, width, seed=seed)]
    return [float(loss) for loss in losses]


def weights(pipe: pipeback.Pipeline) -> Tensor:
    return torch.cat([w.detach().flatten() for w in pipe.model.state_dict().values()])
