"""Timing: how fast the forward (F) and the backward (B) of stages are by autograd, as graphs side by side, and each as
a graph of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.splitting.module_restore import untouched
from pipeback.stages.stage import Stage
from pipeback.vectorized.making.verify import differentiated, example, examples, row
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed
from pipeback.vectorized.tracing.graphs import Graph, Graphs, direct
from pipeback.vectorized.tracing.product_gradients import accumulating

REPEATS = 7
MANY = 8  # micro-batches one after the other, of which the time of more is known
Called = tuple[Graph, Graph, Graph]  # F, B, and what B needs of the weights alone, as ticks call them


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
    stages: Sequence[Stage], graphs: Graphs, weights: Sequence[Tensor], trained: Sequence[int], kind: Kind,
    device: torch.device, *, steps: bool, change: Callable[[Tensor], Tensor],
) -> float:  # fmt: skip
    """Return the speed-up of F and B of all stages as graphs over autograd, one stage after the other.

    steps: with a step of momentum SGD, as in ticks that are one function. change: lays a tensor in memory as the graphs
    take it.
    """
    n = len(stages)
    xs = examples(kind, n, device)
    with torch.no_grad():
        gs = _gradients(graphs, weights, xs)
    params = [p for stage in stages for p in stage.params] if steps else []
    apart = partial(_by_autograd, stages, xs, gs, [torch.zeros_like(p) for p in params], whole=kind.packed)
    as_one = trial(graphs, weights, trained, kind, device, rows=n, change=change, steps=steps)
    with ExitStack() as context:
        for stage in stages:
            context.enter_context(untouched(stage.module))
        times = seconds([apart, as_one], device)
    return times[0] / times[1]


def flush_gain(stage: Stage, graphs: Graphs, xs: Sequence[Tensor], device: torch.device, *, whole: bool) -> float:
    """Return the speed-up of F and B of several micro-batches at once, xs (n, …), over autograd, one after the other.

    graphs: of so many micro-batches, which share the weights of the stage.
    """
    weights, n = [p.detach() for p in stage.module.parameters()], len(xs[0])
    with torch.no_grad():
        gs = _gradients(graphs, weights, xs)

    def at_once() -> None:
        with torch.no_grad():
            saved = graphs.forward(*weights, *xs)[graphs.outputs :]
            graphs.backward(*saved, *graphs.made(*weights), *(gs[n] for n in graphs.gives))

    each = [([x[r] for x in xs], [g[r] for g in gs]) for r in range(min(n, MANY))]

    def one_by_one() -> None:
        for some, back in each:
            _by_autograd([stage], some, back, (), whole=whole)

    with untouched(stage.module):
        times = seconds([one_by_one, at_once], device)
    return times[0] * n / len(each) / times[1]


def called(graphs: Graphs, weights: int, trained: Sequence[int], *, steps: bool = True) -> Called:
    """Return F, B, which adds gradients to velocities if there are `steps`, and what it needs of the weights alone."""
    backward = accumulating(graphs, weights, trained) if steps else graphs.backward
    return direct(graphs.forward), direct(backward), direct(graphs.made)


def trial(
    graphs: Graphs, weights: Sequence[Tensor], trained: Sequence[int], kind: Kind, device: torch.device, *, rows: int,
    change: Callable[[Tensor], Tensor] = Tensor.detach, steps: bool = True, calls: Called | None = None,
) -> Callable[[], Any]:  # fmt: skip
    """Return a call of F and B for all rows. change: lays a tensor in memory.

    steps: with a step of momentum SGD, of weights that are copied before, where the gradients are added to velocities.
    calls: those of `called`, where many trials have the same.
    """
    xs, mine = [change(x) for x in examples(kind, rows, device)], [change(w) for w in weights]
    forward, back, made = calls or called(graphs, len(mine), trained, steps=steps)
    own = tuple[Any, ...]()
    stepped, velocities = list[Tensor](), list[Tensor]()
    if steps:
        mine = [w.clone() if n in trained else w for n, w in enumerate(mine)]
        stepped, velocities = [mine[n] for n in trained], [torch.zeros_like(mine[n]) for n in trained]
        own = 0.5, torch.tensor(0.5, device=device), *velocities
    with torch.no_grad():
        gs = [change(g) for n, g in enumerate(_gradients(graphs, mine, xs)) if n in graphs.gives]

    def call() -> None:
        with torch.no_grad():
            saved = forward(*mine, *xs)[graphs.outputs :]
            kept = [t.clone() for t in saved] if rows > 1 else saved  # as into rings
            back(*kept, *made(*mine), *gs, *own)
            if stepped:
                torch._foreach_add_(stepped, velocities, alpha=-1e-9)

    return call


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images, or the weight of a convolution, with channels last in memory; others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _gradients(graphs: Graphs, weights: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    return [example(y.shape, y.dtype, y.device) for y in graphs.forward(*weights, *xs)[: graphs.outputs]]


def _by_autograd(
    stages: Sequence[Stage], xs: Sequence[Tensor], gs: Sequence[Tensor], velocities: Sequence[Tensor], *, whole: bool
) -> None:
    n, grads = len(stages), list[Any]()
    for r, stage in enumerate(stages):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(floating(x.dtype) and bool(stage.index)) for x in row(xs, r, n)]
            given = [v.clone() for v in inputs] if stage.learnt.clones_input else inputs
            ys = leaves(stage.module(packed(given, whole)))
            grads += differentiated(ys, row(gs, r, n), [*inputs, *stage.params])[len(inputs) :]
    if velocities:
        with torch.no_grad():
            torch._foreach_mul_(list(velocities), 0.5)
            torch._foreach_add_(list(velocities), grads)
            torch._foreach_add_([torch.zeros_like(v) for v in velocities], list(velocities))
