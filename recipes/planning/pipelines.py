"""Trains a small pipeline by every method and compares the bytes that it holds with those that the planner foresees.

Methods whose backwards are split are left out: the planner has what W needs as published, and the library keeps whole
graphs until W. Methods are trained by momentum SGD, and those that are written for another optimizer by that one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.planner.constants import constants
from pipeback.planner.costs import Costs
from pipeback.planner.hardware import devices
from pipeback.planner.memory import footprint
from pipeback.planner.models import Model
from pipeback.planner.options import Option
from pipeback.planner.precisions import precision
from pipeback.planner.techniques import names, technique
from pipeback.planner.timing import loads

WIDTH, SAMPLES, FLUSH, PUSHES = 64, 3, 4, 40
OPTIONS: dict[str, dict[str, int]] = {
    **{name: {"micro_batches": FLUSH} for name in ("gpipe", "one_f_one_b", "interleaved", "looped_bfs")},
    "pipemare": {"anneal": 50}, "pipedream_2bw": {"micro_batches": 10},
}  # fmt: skip
SPLIT = ("zb_h1", "zb_h2", "zb_v")


class Bytes(NamedTuple):
    """What a method holds, measured and planned: copies and state in copies of the weights, activations in bytes."""

    method: str
    copies: float
    planned_copies: float
    state: float
    planned_state: float
    activations: int
    planned_activations: float


def measured() -> list[Bytes]:
    return [of(name) for name in methods.available() if name in names() and name not in SPLIT]


def of(name: str) -> Bytes:
    """The bytes of one method, each stage as on a device of its own."""
    by = "sgd" if not technique(name).needs or "sgd" in technique(name).needs else "adamw"
    pipe = _pipe(name, by)
    x, y = torch.randn(SAMPLES, 9, WIDTH), torch.randn(SAMPLES, 9, WIDTH)
    model = Model.measured(pipe.breakdown(x, y), SAMPLES)
    for _ in range(PUSHES):
        pipe.push(x, y)
    held, stages = pipe.memory(), pipe.stages
    # what a stage has saved and given on lies on two devices
    twice = sum(stage.learnt.handed_bytes * stage.peak_flights for stage in pipe._engine.stages)
    pipe.close()
    many = OPTIONS.get(name, {}).get("micro_batches", FLUSH)
    option = Option(technique(name), pipeline=stages, micro_batch=SAMPLES, micro_batches=many)
    some = loads(option, model, Costs(devices(f"{stages}xA100"), constants()))
    found = footprint(option, some, precision("float", by)).devices
    weights = sum(one.weights for one in found)
    return Bytes(
        name, held.copies, sum(one.weights + one.older for one in found) / weights, held.state,
        sum(one.state for one in found) / weights, held.activations + twice,
        sum(one.activations for one in found),
    )  # fmt: skip


def _pipe(name: str, by: str) -> pipeback.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, WIDTH),
    )
    momentum: Any = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)  # noqa: E731
    adamw: Any = lambda params: torch.optim.AdamW(params, lr=1e-3)  # noqa: E731
    return pipeback.Pipeline(
        model, loss=nn.functional.mse_loss, optimizer=momentum if by == "sgd" else adamw,
        method=methods.create(name, **OPTIONS.get(name, {})), micro_batch_size=SAMPLES,
    )  # fmt: skip
