"""Timing: how fast the forward (F) and the backward (B) of stages are by autograd, as graphs side by side, and each as a
graph of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pipeback.splitting.module_restore import untouched
from pipeback.stages.stage import Stage
from pipeback.vectorized.forms import Kind, floating, leaves, packed
from pipeback.vectorized.graph_rewrites import Graphs, accumulating, direct
from pipeback.vectorized.verify import differentiated, example, examples, row

REPEATS = 5


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Return how long each of the calls takes at the median; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, found in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            found.append(time.perf_counter() - begin)
    return [statistics.median(found[1:]) for found in times]


def gain(stages: Sequence[Stage], weights: Sequence[Tensor], graphs: Graphs, kind: Kind, device: torch.device) -> float:
    """Return the speed-up of F and B of all stages as graphs over autograd, one stage after the other."""
    n = len(stages)
    xs = examples(kind, n, device)
    with torch.no_grad():
        gs = _gradients(graphs, weights, xs)
    with ExitStack() as context:
        for stage in stages:
            context.enter_context(untouched(stage.module))
        apart, as_one = seconds(
            [
                lambda: _by_autograd(stages, xs, gs, whole=kind.packed),
                lambda: as_graphs(graphs, weights, xs, gs, rows=n),
            ],
            device,
        )
    return apart / as_one


def trial(
    graphs: Graphs, weights: Sequence[Tensor], trained: Sequence[int], kind: Kind, device: torch.device, *, rows: int,
    change: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Callable[[], Any]:  # fmt: skip
    """Return a call of F, and of B with the step of the velocities, for all rows. change: lays a tensor in memory."""
    xs, mine = [change(x) for x in examples(kind, rows, device)], [change(w) for w in weights]
    velocities = [torch.zeros_like(mine[n]) for n in trained]
    backward, made = direct(accumulating(graphs, len(mine), trained)), graphs.each(direct).made
    with torch.no_grad():
        gs = [change(g) for n, g in enumerate(_gradients(graphs, mine, xs)) if n in graphs.gives]
    momentum = torch.tensor(0.5, device=device)

    def call() -> None:
        with torch.no_grad():
            saved = graphs.forward(*mine, *xs)[graphs.outputs :]
            kept = [t.clone() for t in saved] if rows > 1 else saved  # as into rings
            backward(*kept, *made(*mine), *gs, 0.5, momentum, *velocities)

    return call


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images, or the weight of a convolution, with channels last in memory, and others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def as_graphs(
    graphs: Graphs, weights: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor], *, rows: int
) -> None:
    """Do F and B of all rows; what waits between them is copied, as into rings, if there are several rows."""
    with torch.no_grad():
        saved = graphs.forward(*weights, *xs)[graphs.outputs :]
        kept = [t.clone() for t in saved] if rows > 1 else saved
        graphs.backward(*kept, *graphs.made(*weights), *(gs[n] for n in graphs.gives))


def _gradients(graphs: Graphs, weights: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    return [example(y.shape, y.dtype, y.device) for y in graphs.forward(*weights, *xs)[: graphs.outputs]]


def _by_autograd(stages: Sequence[Stage], xs: Sequence[Tensor], gs: Sequence[Tensor], *, whole: bool) -> None:
    n = len(stages)
    for r, stage in enumerate(stages):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(floating(x.dtype) and bool(stage.index)) for x in row(xs, r, n)]
            given = [v.clone() for v in inputs] if stage.learnt.clones_input else inputs
            ys = leaves(stage.module(packed(given, whole)))
            differentiated(ys, row(gs, r, n), [*inputs, *stage.params])
