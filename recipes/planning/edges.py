"""Measures from how many micro-batches per push on streaming hides on this machine, beside what is predicted.

A push of m micro-batches of a model whose weights are in a store waits for them a share of its time. The edge is the
smallest m with at most `HIDDEN` of waiting. It is predicted twice: by `pipe.plan`, a dry run of the real order with
seconds of one rehearsal, and by the planner's lanes, with seconds that were recorded on the same model without a store.
Both take the speed of the store as `pipe.plan` has measured it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import pipeback
from pipeback.plan.survey import PlanInputs
from pipeback.plan.training_plan import HIDDEN
from pipeback.planner.lanes import Visit, stream

STAGES, WIDTH, SAMPLES = 8, 2048, 8  # so large that the runtime's own time per operation is little
MOST = 64  # micro-batches per push that are tried
PUSHES = 5  # of every size, of which the median counts


class EdgeHere(NamedTuple):
    """The edge of a store: micro-batches per push. None: no number that was tried hides streaming."""

    store: str
    lanes: int | None
    dry_run: int | None
    measured: int | None


def measured(stores: tuple[str, ...] = ("host", "disk")) -> list[EdgeHere]:
    with tempfile.TemporaryDirectory(prefix="pipeback-edges-") as folder:
        return [_edge(name, name if name == "host" else f"disk:{folder}") for name in stores]


def _edge(name: str, store: str) -> EdgeHere:
    torch.set_num_threads(1)
    x, y = torch.randn(2, SAMPLES * MOST, WIDTH)
    costs = _costs(x[: SAMPLES * 8], y[: SAMPLES * 8])
    pipe = _pipe(store)
    try:
        for _ in range(2):
            pipe.push(x[: SAMPLES * 4], y[: SAMPLES * 4])
        plan = pipe.plan(x[: SAMPLES * 4], y[: SAMPLES * 4])
        found = smallest(lambda m: _waiting(pipe, x[: SAMPLES * m], y[: SAMPLES * m]) <= HIDDEN)
        lanes = smallest(lambda m: streamed(plan.facts, costs, m) <= HIDDEN)
        return EdgeHere(name, lanes, plan.hides[0], found)
    finally:
        pipe.close()


def _pipe(store: str | None) -> pipeback.Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    adamw: Any = lambda params: torch.optim.AdamW(params, lr=1e-4)  # noqa: E731
    return pipeback.Pipeline(
        nn.Sequential(*blocks), loss=nn.functional.mse_loss, optimizer=adamw, method="gpipe", micro_batch_size=SAMPLES,
        store=store,
    )  # fmt: skip


Costs = list[Mapping[str, float]]  # seconds of F and B of every stage


def _costs(x: torch.Tensor, y: torch.Tensor) -> Costs:
    """Of a micro-batch whose weights are here."""
    pipe = _pipe(None)
    pipe.push(x, y)
    pipe.record()
    for _ in range(PUSHES):
        pipe.push(x, y)
    costs = pipe.recorded.costs()
    pipe.close()
    return [{kind: float(seconds) for kind, seconds in one.items()} for one in costs]


def _waiting(pipe: pipeback.Pipeline, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of waiting of pushes of one size."""
    pipe.push(x, y)
    pipe.wait()
    shares = []
    for _ in range(PUSHES):
        before = pipe.traffic()
        pipe.push(x, y)
        after = pipe.traffic()
        shares.append((after.stall - before.stall) / (after.seconds - before.seconds))
    return statistics.median(shares)


def streamed(facts: PlanInputs, costs: Costs, m: int) -> float:
    """The share of waiting that the planner's lanes predict for pushes of m micro-batches."""
    each = [(facts.stages[s].load, one) for s, one in enumerate(costs)]
    forwards = [Visit(n, m * one["F"], load.fetch) for n, (load, one) in enumerate(each)]
    backwards = [Visit(n, m * one["B"], load.fetch, load.leave, load.update) for n, (load, one) in enumerate(each)]
    return stream([*forwards, *backwards[::-1]], facts.prefetch or 0).share


def smallest(hides: Callable[[int], bool]) -> int | None:
    """The fewest micro-batches per push that hide streaming."""
    return next((m for m in range(1, MOST + 1) if hides(m)), None)
