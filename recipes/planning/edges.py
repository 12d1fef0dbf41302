"""Measures from how many micro-batches per push on streaming hides on this machine, beside what is predicted.

A push of m micro-batches of a model whose weights are in a store waits for them a share of its time. The edge is the
smallest m with at most `HIDDEN` of waiting. It is predicted twice from the same measured speeds: by the dry run of the
real order (`pipe.plan`), and by the planner's lanes, which know layers, seconds and bytes alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import pipeback
from pipeback.plan.survey import PlanInputs
from pipeback.plan.training_plan import HIDDEN
from pipeback.planner.lanes import Visit, stream

STAGES, WIDTH, SAMPLES = 8, 768, 4
MOST = 64  # micro-batches per push that are tried
PUSHES = 3  # of every size, of which the median counts


class EdgeHere(NamedTuple):
    """The edge of a store: micro-batches per push. None: no number that was tried hides streaming."""

    store: str
    lanes: int | None
    dry_run: int | None
    measured: int | None
    waiting: dict[int, float]  # the share that was measured, by micro-batches per push


def measured(stores: tuple[str, ...] = ("host", "disk")) -> list[EdgeHere]:
    with tempfile.TemporaryDirectory(prefix="pipeback-edges-") as folder:
        return [_edge(name, name if name == "host" else f"disk:{folder}") for name in stores]


def _edge(name: str, store: str) -> EdgeHere:
    torch.set_num_threads(1)
    pipe = _pipe(store)
    try:
        x, y = torch.randn(2, SAMPLES * MOST, WIDTH)
        for _ in range(2):
            pipe.push(x[: SAMPLES * 4], y[: SAMPLES * 4])
        plan = pipe.plan(x[: SAMPLES * 4], y[: SAMPLES * 4])
        shares = {}
        size = 1
        while size <= MOST:
            shares[size] = _waiting(pipe, x[: SAMPLES * size], y[: SAMPLES * size])
            size = max(size + 1, size * 5 // 4)
        found = next((size for size, share in shares.items() if share <= HIDDEN), None)
        lanes = smallest(lambda m: streamed(plan.facts, m) <= HIDDEN)
        return EdgeHere(name, lanes, plan.hides[0], found, shares)
    finally:
        pipe.close()


def _pipe(store: str) -> pipeback.Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    adamw: Any = lambda params: torch.optim.AdamW(params, lr=1e-4)  # noqa: E731
    return pipeback.Pipeline(
        nn.Sequential(*blocks), loss=nn.functional.mse_loss, optimizer=adamw, method="gpipe", micro_batch_size=SAMPLES,
        store=store,
    )  # fmt: skip


def _waiting(pipe: pipeback.Pipeline, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of waiting of pushes of one size."""
    pipe.push(x, y)
    pipe.wait()
    shares = []
    for _ in range(PUSHES):
        before = pipe.traffic()
        pipe.push(x, y)
        pipe.push(x, y)
        after = pipe.traffic()
        shares.append((after.stall - before.stall) / (after.seconds - before.seconds))
    return statistics.median(shares)


def streamed(facts: PlanInputs, m: int) -> float:
    """The share of waiting that the planner's lanes predict for pushes of m micro-batches."""
    loads = [facts.stages[s].load for s in sorted(facts.stages)]
    forwards = [Visit(n, m * load.forward, load.fetch) for n, load in enumerate(loads)]
    backwards = [
        Visit(n, m * load.backward + (m - 1) * load.add, load.fetch, load.leave,
              load.update)
        for n, load in enumerate(loads)
    ]  # fmt: skip
    return stream([*forwards, *backwards[::-1]], facts.prefetch or 0).share


def smallest(hides: Callable[[int], bool]) -> int | None:
    return next((m for m in range(1, MOST + 1) if hides(m)), None)
