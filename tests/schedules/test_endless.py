"""A schedule whose programs end is refused in every runtime, at once or where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.schedules.ops import Op, Schedule
from pipeback.schedules.programs import flowing

ENDED = r"stage \d: the program of the schedule .*ending ended after {} operations, but programs are endless"


def finite(operations: int) -> Schedule:
    def ending(stage: int, stages: int) -> Iterator[Op]:
        return islice(flowing(2)(stage, stages), operations)

    return ending


def build(operations: int, **options: object) -> pipeback.Pipeline:
    method = type("Finite", (pipeback.Method,), {"schedule": finite(operations)})()
    return pipeback.Pipeline(
        nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), loss=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01), method=method, micro_batch_size=1, **options,
    )  # fmt: skip


RUNTIMES = [{}, {"vectorize": True}, {"workers": 2}, {"store": "host"}]


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_short_program_is_refused_at_once(options):
    with pytest.raises(RuntimeError, match=ENDED.format(30)):
        build(30, **options)


@pytest.mark.parametrize("options", RUNTIMES, ids=str)
def test_a_long_program_is_refused_where_it_ends(options):
    pipe = build(450, **options)
    x = torch.randn(100, 2)
    float(pipe.push(x, x))
    with pytest.raises(RuntimeError, match=ENDED.format(450)):
        float(pipe.push(x, x))
    pipe.close()
