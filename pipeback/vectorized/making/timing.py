"""Timing: how fast the forward (F) and the backward (B) of stages are by autograd, and as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.own_autocast import around
from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.vectorized.making.closeness import differentiated
from pipeback.vectorized.making.verify import example, examples, row
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed
from pipeback.vectorized.tracing.graphs import Graphs, direct

REPEATS = 7
MANY = 8  # micro-batches one after the other, of which the time of more is known


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Return how long each of the calls takes at least; they take turns.

    Other load on the machine only adds time. Where all is done by this thread, that is not even counted.
    """
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, found in zip(calls, times, strict=True):
            begin = clock()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            found.append(clock() - begin)
    return [min(found[1:]) for found in times]


def gain(
    stages: Sequence[Stage], graphs: Graphs, weights: Sequence[Tensor], kind: Kind, device: torch.device, *,
    change: Callable[[Tensor], Tensor],
) -> float:  # fmt: skip
    """Return the speed-up of F and B of all stages as graphs over autograd, one stage after the other.

    change: lays a tensor in memory as the graphs take it.
    """
    n = len(stages)
    xs = examples(kind, n, device)
    with torch.no_grad():
        gs = gradients(graphs, weights, xs)
    apart = partial(_by_autograd, stages, xs, gs, whole=kind.packed)
    as_one = trial(graphs, weights, kind, device, rows=n, change=change)
    with ExitStack() as context:
        for stage in stages:
            context.enter_context(untouched(stage))
        times = seconds([apart, as_one], device)
    return times[0] / times[1]


def flush_gain(stage: Stage, graphs: Graphs, xs: Sequence[Tensor], device: torch.device, *, whole: bool) -> float:
    """Return the speed-up of F and B of several micro-batches at once, xs (n, …), over autograd, one after the other.

    graphs: of so many micro-batches, which share the weights of the stage.
    """
    weights, n = [p.detach() for p in stage.module.parameters()], len(xs[0])
    with torch.no_grad():
        gs = gradients(graphs, weights, xs)

    def at_once() -> None:
        with torch.no_grad():
            saved = graphs.forward(*weights, *xs)[graphs.outputs :]
            graphs.backward(*saved, *graphs.made(*weights), *(gs[n] for n in graphs.gives))

    each = [([x[r] for x in xs], [g[r] for g in gs]) for r in range(min(n, MANY))]

    def one_by_one() -> None:
        for some, back in each:
            _by_autograd([stage], some, back, whole=whole)

    with untouched(stage):
        times = seconds([one_by_one, at_once], device)
    return times[0] * n / len(each) / times[1]


def trial(
    graphs: Graphs, weights: Sequence[Tensor], kind: Kind, device: torch.device, *, rows: int,
    change: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Callable[[], Any]:  # fmt: skip
    """Return a call of F and B for all rows. change: lays a tensor in memory."""
    xs, mine = [change(x) for x in examples(kind, rows, device)], [change(w) for w in weights]
    forward, back, made, *_ = graphs.each(direct)
    with torch.no_grad():
        gs = [change(g) for n, g in enumerate(gradients(graphs, mine, xs)) if n in graphs.gives]

    def call() -> None:
        with torch.no_grad():
            saved = forward(*mine, *xs)[graphs.outputs :]
            kept = [t.clone() for t in saved] if rows > 1 else saved  # as into rings
            back(*kept, *made(*mine), *gs)

    return call


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images, or the weight of a convolution, with channels last in memory; others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def change_seconds(kind: Kind, device: torch.device) -> float:
    """Return how long it takes to lay the inputs of a single stage with channels last."""
    xs = examples(kind, 1, device)
    (found,) = seconds([lambda: [channels_last(x) for x in xs]], device)
    return found


def gradients(graphs: Graphs, weights: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return made-up gradients of the outputs."""
    return [example(y.shape, y.dtype, y.device) for y in graphs.forward(*weights, *xs)[: graphs.outputs]]


def _by_autograd(stages: Sequence[Stage], xs: Sequence[Tensor], gs: Sequence[Tensor], *, whole: bool) -> None:
    n = len(stages)
    for r, stage in enumerate(stages):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(floating(x.dtype) and bool(stage.index)) for x in row(xs, r, n)]
            given = [v.clone() for v in inputs] if stage.learnt.clones_input else inputs
            with around(stage):
                ys = leaves(stage.module(packed(given, whole)))
            differentiated(ys, row(gs, r, n), [*inputs, *stage.params])
