"""Verify: checks that stages can run as one. Each row of the graphs must do what its stage does, and must not depend on
any other row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeback.private import listened
from pipeback.splitting.module_restore import untouched
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.vectorized.capture import Unfit, capture
from pipeback.vectorized.graph_rewrites import Graph, Graphs, recomputing
from pipeback.vectorized.ring_buffers import Kind, RingBuffers, unfolded

# how far the gradients of both may differ, in units of the dtype's epsilon, since sums are in another order
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUGH = 0.05
SCALES = (
    1.0,
    0.001,
    30.0,
    1000.0,
)  # scales of the test inputs: limits and thresholds show at large or small values


def verified(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    trained: Sequence[int],
    x: Tensor,
    kind: Kind,
    length: int,
    *,
    recompute: bool = False,
) -> RingBuffers:
    """Return ring buffers with graphs of the stages for micro-batches like x.

    weights: (n, …), of which those of the numbers `trained` get gradients. length: of the rings, in micro-batches.
    recompute: whether the backward (B) repeats the forward (F). Raises `Unfit` where the stages cannot run as one.
    """
    like = stages[-1].module  # not the first stage: in a traced model its input has no gradient
    pairs = zip([name for name, _ in like.named_parameters()], weights, like.parameters(), strict=True)
    named = {name: w.requires_grad_(p.requires_grad) for name, w, p in pairs}
    xs = x.unsqueeze(0).repeat(len(stages), *(1 for _ in x.shape))
    try:
        clones = check_plain(stages, x)
        graphs = capture(like, named, xs, clones=clones)
        graphs = recomputing(graphs) if recompute else graphs
    finally:
        for w in weights:
            w.requires_grad_(False)
    with torch.no_grad():
        y, *saved = graphs.forward(*weights, xs)
        rings = RingBuffers(graphs, kind, saved, _folds(graphs, weights, xs, saved), len(stages), length, x.device)
        made = graphs.made(*weights)
        own = {w.untyped_storage().data_ptr() for w in weights}
        if all(t.untyped_storage().data_ptr() in own for t in made):
            rings.made = made  # they are views, which change with the weights
        _prove(stages, weights, trained, rings, xs, y)
    return rings


def judged_alike(stage: Stage, graph: Graph, x: Tensor, target: Any) -> None:
    """Raise `Unfit` unless the graph of the stage with the loss does what the stage does."""
    assert stage.loss is not None
    with torch.enable_grad(), untouched(stage.module):
        leaf = x.detach().clone().requires_grad_()
        loss = stage.loss(stage.module(leaf.clone()), target)  # a copy: the module may change it in place
        wanted = torch.autograd.grad(loss, [leaf, *stage.params], allow_unused=True)
    found = graph(*(p.detach() for p in stage.module.parameters()), x, target)
    for a, b in zip(found, (loss, *wanted), strict=True):
        if b is None or not _close(a, b):
            raise Unfit("its graph computes something else")


def gain(stages: Sequence[Stage], weights: Sequence[Tensor], rings: RingBuffers, repeats: int = 5) -> float:
    """Return the speed-up of F and B of all rows at once over one after the other, timed alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    xs = example((rings.rows, *rings.kind[0]), rings.kind[1], rings.inputs.device)
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for r, stage in enumerate(stages):
            with torch.enable_grad(), untouched(stage.module):
                x = xs[r].clone().requires_grad_()
                given = x.clone() if stage.learnt.clones_input else x
                torch.autograd.grad(stage.module(given), [x, *stage.params], xs[r], allow_unused=True)
        _synchronized(xs.device)
        between = time.perf_counter()
        with torch.no_grad():
            _, *saved = rings.eager.forward(*weights, xs)
            made = rings.eager.made(*weights) if rings.made is None else rings.made
            copies = [t.clone() for t in saved]  # as into rings
            rings.eager.backward(*copies, *made, xs)
        _synchronized(xs.device)
        times[0].append(between - begin)
        times[1].append(time.perf_counter() - between)
    return statistics.median(times[0][1:]) / statistics.median(times[1][1:])


def check_plain(stages: Sequence[Stage], x: Tensor) -> bool:
    """Raise `Unfit` where a forward has side effects; return whether it changes its input in place."""
    module = stages[0].module
    if any(listened(stage.module) for stage in stages):
        raise Unfit("there are hooks on their modules or weights")
    draws = [accelerators.generator(device) for device in (None, x.device)]
    states = [generator.get_state() for generator in draws]
    seen = [b._version for b in module.buffers()]
    given = x.clone()
    with untouched(module), accelerators.forked([x.device]), torch.no_grad():
        module(given)
        changed = seen != [b._version for b in module.buffers()]
        now = [generator.get_state() for generator in draws]
    if changed:
        raise Unfit("their forward changes a buffer, as batch normalisation does")
    if not all(torch.equal(a, b) for a, b in zip(states, now, strict=True)):
        raise Unfit("their forward draws random numbers")
    return bool(given._version)


def _prove(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    trained: Sequence[int],
    rings: RingBuffers,
    xs: Tensor,
    y: Tensor,
) -> None:
    g = example(xs.shape, xs.dtype, xs.device)
    _, *saved = rings.graphs.forward(*weights, xs)
    made = rings.graphs.made(*weights)
    some = [(r, r) for r in range(len(stages))]
    rings.leave(saved, some)
    *grads, gx = rings.graphs.backward(*rings.back(some), *made, g)
    if gx is None:
        raise Unfit("their output does not depend on their input")
    names = [name for name, _ in stages[-1].module.named_parameters()]
    for n in trained:
        if grads[n] is None:  # an optimizer skips it, and would not skip zeros
            raise Unfit(f"their {names[n]} is not used, and gets no gradient")
    for r, stage in enumerate(stages):
        out, wanted = _both(stage, stage.module, xs[r], g[r])
        # the same code on the same weights has the same bits; in half types only bits tell constants apart
        for scale in SCALES:
            mine, own = _both(stage, stage.module, scale * xs[r], g[r])
            same, others = _both(stage, partial(_as, stages[-1].module, stage), scale * xs[r], g[r])
            first = not stage.index  # the gradient of its input is not needed
            if not all(map(_same, (mine, *own[first:]), (same, *others[first:]))):
                raise Unfit(f"{stage.label} computes something else than {stages[-1].label}")
        if not stage.index:  # the gradient of its input is not needed
            wanted = (gx[r], *wanted[1:])
        found = [gx[r], *(grads[n][r] for n in trained)]
        for a, b in zip([y[r], *found], [out, *wanted], strict=True):
            if b is None or not _close(a, b):
                raise Unfit(f"{stage.label} computes something else than {stages[0].label}")


def _both(
    stage: Stage, module: Callable[[Tensor], Tensor], x: Tensor, g: Tensor
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return a module's output for x, and the gradients of x and of the stage's weights."""
    with torch.enable_grad(), untouched(stage.module):
        x = x.clone().requires_grad_()
        out = module(x.clone())  # a copy: the module may change it in place
        return out, torch.autograd.grad(out, [x, *stage.params], g, allow_unused=True)


def _as(other: nn.Module, stage: Stage, x: Tensor) -> Tensor:
    """Return the output of another stage's module with the weights of this one."""
    names = [name for name, _ in other.named_parameters()]  # in a traced model, every stage has its own names
    values: Tensor = functional_call(other, dict(zip(names, stage.module.parameters(), strict=True)), (x,))
    return values


def _folds(graphs: Graphs, weights: Sequence[Tensor], xs: Tensor, saved: Sequence[Tensor]) -> list[int]:
    """Return for every saved tensor the dimension of the rows, found by changing the input of one row."""
    possible = [[dim for dim in range(t.dim()) if t.shape[dim] % len(xs) == 0] for t in saved]
    for r in range(len(xs)):
        other = xs.clone()
        other[r] += 1
        _, *after = graphs.forward(*weights, other)
        for dims, a, b in zip(possible, saved, after, strict=True):
            changed = (a != b) & ~((a != a) & (b != b))
            for dim in list(dims):
                elsewhere = unfolded(changed, dim, len(xs)).clone()
                elsewhere[r] = False
                if elsewhere.any():
                    dims.remove(dim)
    for dims, t in zip(possible, saved, strict=True):
        if not dims:
            raise Unfit(f"torch keeps something of shape {tuple(t.shape)}, which does not fall into rows")
    return [dims[0] for dims in possible]


def _synchronized(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def example(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal numbers, always the same ones; the caller's random state is not changed."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _close(a: Tensor, b: Tensor) -> bool:
    far = torch.linalg.vector_norm((a - b).double())
    return bool(far <= CLOSE.get(a.dtype, ROUGH) * torch.linalg.vector_norm(b.double()) + 1e-12)
