"""Verify: checks that stages can run as one. Each row of the graphs must do what its stage does, and must not depend on
any other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeback.stages.own_autocast import around, casting
from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.vectorized.buffers.ring_buffers import RingBuffers, unfolded
from pipeback.vectorized.making.closeness import (
    Values,
    alike,
    all_alike,
    differentiated,
    exactly,
    first,
    near,
    rounds,
    same,
    summed,
)
from pipeback.vectorized.making.known_graphs import known
from pipeback.vectorized.making.side_effects import check_plain, traced
from pipeback.vectorized.making.sizes import Sizes
from pipeback.vectorized.tracing.capture import Unfit, Unlike, capture
from pipeback.vectorized.tracing.forms import Kind, floating, leaves, packed
from pipeback.vectorized.tracing.graphs import Graph, Graphs
from pipeback.vectorized.tracing.split_graph import recomputing

SCALES = (1.0, 0.001, 30.0, 1000.0)  # of test inputs: limits and thresholds show at large or small values


def in_full_precision(check: Callable[..., None]) -> Callable[..., None]:
    """Let a check of stages compare numbers without the rounding by which kernels for the same products may differ."""

    @wraps(check)
    def checked(who: Any, *given: Any, **named: Any) -> None:
        stage = who if isinstance(who, Stage) else who[0]
        with accelerators.full_precision(stage.device or torch.device("cpu")):
            check(who, *given, **named)

    return checked


def verified(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    trained: Sequence[int],
    xs: Sequence[Tensor],
    kind: Kind,
    places: Sequence[int],
    length: int,
    *,
    recompute: bool = False,
    products: bool = False,
    fresh: bool = False,
) -> RingBuffers:
    """Return ring buffers with graphs of the stages for micro-batches like xs, the input tensors of one stage.

    weights: (n, …), of which those of the numbers `trained` get gradients. places, length: of the rings, in
    micro-batches. recompute: whether the backward (B) repeats the forward (F). products: see `capture`. fresh: see
    `captured`. Raises `Unfit` where the stages cannot run as one.
    """
    n = len(stages)
    graphs = captured(stages, weights, xs, kind, n, products=products, fresh=fresh)
    graphs = recomputing(graphs) if recompute else graphs
    every = _repeated(xs, n)
    with torch.no_grad(), casting(stages, kind.casts):
        saved = graphs.forward(*weights, *every)[graphs.outputs :]
        folds = _folds(graphs, weights, every, saved, n)
        rings = RingBuffers(graphs, kind, saved, folds, places, length, xs[0].device)
        rings.view(weights)
        _prove(stages, weights, trained, rings, every)
    return rings


def captured(
    stages: Sequence[Stage], weights: Sequence[Tensor], xs: Sequence[Tensor], kind: Kind, rows: int, *, products: bool,
    shared: bool = False, fresh: bool = False,
) -> Graphs:  # fmt: skip
    """Return the graphs of stages like these, for so many rows: as many as `weights` have. Raises `Unfit`.

    shared: the rows are micro-batches of one stage, whose weights these are. fresh: they are traced for this call.
    """
    like = stages[-1].module  # not the first stage: in a traced model its input has no gradient
    pairs = zip([name for name, _ in like.named_parameters()], weights, like.parameters(), strict=True)
    named = {name: w.requires_grad_(p.requires_grad) for name, w, p in pairs}
    try:
        with casting(stages, kind.casts):
            traits = check_plain(stages, packed(xs, kind.packed))
        enters = len(stages) == 1 and not stages[0].index
        every, how = _repeated(xs, rows), (rows, kind.packed, enters, products, shared, kind.casts)

        def trace() -> Graphs:
            with traced(like):
                return capture(like, named, every, traits, *how)

        if fresh:
            return trace()
        forms = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (*weights, *every))
        return known(like, (forms, traits, how), trace)
    finally:
        for w in weights:
            w.requires_grad_(False)


def resized_alike(graphs: Graphs, sizes: Sizes, weights: Sequence[Tensor], xs: Sequence[Tensor], rows: int) -> None:
    """Raise `Unfit` unless the graphs for fewer rows do what the graphs of all rows do. xs: inputs of one stage."""
    n, every = rows, len(weights)
    with torch.no_grad(), accelerators.full_precision(xs[0].device):
        given = [x * (r + 1) if floating(x.dtype) else x for x in xs for r in range(n)]
        whole = [torch.stack(given[n * k : n * (k + 1)]) for k in range(len(xs))]
        gs = [example(y.shape, y.dtype, y.device) for y in graphs.forward(*weights, *whole)[: graphs.outputs]]

        def both(graphs: Graphs, some: slice) -> list[Tensor | None]:
            mine = [w[some].contiguous() for w in weights]
            found = graphs.forward(*mine, *(x[some] for x in whole))
            back = (gs[n][some] for n in graphs.gives)
            found_back = graphs.backward(*found[graphs.outputs :], *graphs.made(*mine), *back)
            return [*found[: graphs.outputs], *found_back[: every + len(xs)]]

        wanted, rough = both(graphs, slice(None)), rounds(*graphs[:3])
        for some in (slice(0, n - 1), slice(1, n), slice(n - 1, n)):
            found = both(sizes.at(some.stop - some.start)[0], some)
            for a, b in zip(found, wanted, strict=True):
                if not alike(a, None if b is None else b[some], rough):
                    raise Unfit("fewer of them compute something else")


def _repeated(xs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return inputs of one stage as (n, …)."""
    return [x if rows == 1 else x.unsqueeze(0).repeat(rows, *(1 for _ in x.shape)) for x in xs]


@in_full_precision
def judged_alike(stage: Stage, graph: Graph, x: Any, target: Any) -> None:
    """Raise `Unfit` unless the graph of the stage with the loss does what the stage does."""
    assert stage.loss is not None
    with torch.enable_grad(), untouched(stage):
        inputs = [v.detach().clone().requires_grad_(floating(v.dtype)) for v in leaves(x)]
        given = packed([v.clone() for v in inputs], type(x) is tuple)  # a copy: the module may change it in place
        with around(stage):
            loss = stage.loss(stage.module(given), target)
        moving = [v for v in inputs if v.requires_grad]
        each = iter(torch.autograd.grad(loss, [*moving, *stage.params], allow_unused=True))
        wanted = [*(next(each) if v.requires_grad else None for v in inputs), *each]
    found = graph(*(p.detach() for p in stage.module.parameters()), *leaves(x), target)
    wanted = [loss, *wanted]
    mine = [None if b is None and (a is None or not a.any()) else a for a, b in zip(found, wanted, strict=True)]
    then, one = partial(_then, stage.loss, target), torch.ones_like(loss)
    if not all_alike(mine, wanted, rounds(graph), partial(exactly, stage, inputs, [one], type(x) is tuple, then)):
        raise Unfit("its graph computes something else")


@in_full_precision
def shared_alike(stage: Stage, graphs: Graphs, xs: Sequence[Tensor], *, whole: bool) -> None:
    """Raise `Unfit` unless the graphs of several micro-batches, xs (n, …), do what the stage does with each of them."""
    weights, count = [p.detach() for p in stage.module.parameters()], len(xs[0])
    with torch.no_grad():
        found = graphs.forward(*weights, *xs)
        ys, saved = found[: graphs.outputs], found[graphs.outputs :]
        gs = [example(y.shape, y.dtype, y.device) for y in ys]
        back = graphs.backward(*saved, *graphs.made(*weights), *(gs[n] for n in graphs.gives))
    rough = rounds(*graphs[:3])
    trained = [n for n, p in enumerate(stage.module.parameters()) if p.requires_grad]
    grads, gxs = [back[n] for n in trained], back[len(weights) :]
    sums: list[Any] = [None] * len(trained)
    exact: list[Callable[[], Values | None]] = []
    for n in range(count):
        outs, wanted = _both(stage, stage.module, [x[n] for x in xs], [g[n] for g in gs], whole)
        mine = [None if gx is None else gx[n] for gx in gxs]
        own = wanted[: len(xs)] if stage.index else [None] * len(xs)  # nobody needs that of the first stage's input
        exact.append(partial(exactly, stage, [x[n] for x in xs], [g[n] for g in gs], whole))
        some = [*(y[n] for y in ys), *(mine if stage.index else own)]
        _must_be_close(some, [*outs, *own], rough, partial(first, exact[n], len(some)))
        sums = [g if total is None else total + g for total, g in zip(sums, wanted[len(xs) :], strict=True)]
    _must_be_close(grads, sums, rough, partial(summed, exact, len(trained)))


@in_full_precision
def losses_alike(stage: Stage, graph: Graph, xs: Sequence[Tensor], target: Tensor, *, whole: bool) -> None:
    """Raise `Unfit` unless the graph of several micro-batches does what the last stage does with each of them."""
    assert stage.loss is not None
    seeds = torch.arange(1.0, len(target) + 1, dtype=torch.float64, device=target.device).to(xs[0].dtype)
    with torch.no_grad():
        losses, *found = graph(*(p.detach() for p in stage.module.parameters()), *xs, target, seeds)
    sums: list[Any] = [None] * len(stage.params)
    exact: list[Callable[[], Values | None]] = []
    rough = rounds(graph)
    for n in range(len(target)):
        with torch.enable_grad(), untouched(stage):
            inputs = [x[n].detach().clone().requires_grad_(floating(x.dtype)) for x in xs]
            with around(stage):
                loss = stage.loss(stage.module(packed([v.clone() for v in inputs], whole)), target[n])
            wanted = differentiated([loss], [seeds[n].to(loss.dtype)], [*inputs, *stage.params])
        mine = [None if gx is None else gx[n] for gx in found[: len(xs)]]
        then, some = partial(_then, stage.loss, target[n]), [losses[n], *mine]
        exact.append(partial(exactly, stage, [x[n] for x in xs], [seeds[n]], whole, then))
        _must_be_close(some, [loss, *wanted[: len(xs)]], rough, partial(first, exact[n], len(some)))
        sums = [g if total is None else total + g for total, g in zip(sums, wanted[len(xs) :], strict=True)]
    _must_be_close(found[len(xs) :], sums, rough, partial(summed, exact, len(stage.params)))


def _then(loss: Callable[[Any, Any], Tensor], target: Any, y: Any) -> Tensor:
    return loss(y, target)


def _must_be_close(found: Values, wanted: Values, rough: bool, exact: Callable[[], Values | None]) -> None:
    if not all_alike(found, wanted, rough, exact):
        raise Unfit("several micro-batches at once compute something else")


@in_full_precision
def _prove(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    trained: Sequence[int],
    rings: RingBuffers,
    xs: Sequence[Tensor],
) -> None:
    n, graphs = len(stages), rings.graphs
    found = graphs.forward(*weights, *xs)
    ys, saved = found[: graphs.outputs], found[graphs.outputs :]
    gs = [example(y.shape, y.dtype, y.device) for y in ys]
    made = graphs.made(*weights)
    some = [(r, r) for r in range(n)]
    rings.leave(saved, some)
    back = graphs.backward(*rings.back(some), *made, *(gs[n] for n in graphs.gives))
    grads, gxs = back[: len(weights)], back[len(weights) :]
    if stages[-1].index and not any(gx is not None for gx in gxs) and any(floating(x.dtype) for x in xs):
        raise Unfit("their output does not depend on their input")
    names = [name for name, _ in stages[-1].module.named_parameters()]
    for m in trained:
        if grads[m] is None:  # an optimizer skips it, and would not skip zeros
            raise Unfit(f"their {names[m]} is not used, and gets no gradient")
    whole, rough = rings.kind.packed, rounds(*graphs[:3])
    for r, stage in enumerate(stages):
        mine_x, mine_g = row(xs, r, n), row(gs, r, n)
        outs, wanted = _both(stage, stage.module, mine_x, mine_g, whole)
        # the same code on the same weights has the same bits; in half types only bits tell constants apart
        for scale in SCALES:
            scaled = [scale * x if floating(x.dtype) else x for x in mine_x]
            own = partial(_computed, stage, stage.module, scaled, mine_g, whole)
            like = partial(_as, stages[-1].module, stage)
            with untouched(stages[-1]):
                one, other = own(), _computed(stage, like, scaled, mine_g, whole)
            # kernels that add in any order have other bits at every call
            bits = all(map(same, one, other)) or all(map(same, one, own()))
            equal = same if bits else partial(near, rough=rough)
            if not all(map(equal, one, other)):
                raise Unlike(f"{stage.label} computes something else than {stages[-1].label}")
        of_inputs = [None if gx is None else row([gx], r, n)[0] for gx in gxs]
        if not stage.index:
            of_inputs = list(wanted[: len(xs)])
        mine_found = [*row(ys, r, n), *of_inputs, *row([grads[m] for m in trained], r, n)]
        if not all_alike(mine_found, [*outs, *wanted], rough, partial(exactly, stage, mine_x, mine_g, whole)):
            raise Unlike(f"{stage.label} computes something else than {stages[0].label}")


def row(tensors: Sequence[Tensor], r: int, rows: int) -> list[Tensor]:
    return list(tensors) if rows == 1 else [t[r] for t in tensors]


def _both(
    stage: Stage, module: Callable[[Any], Any], xs: Sequence[Tensor], gs: Sequence[Tensor], whole: bool
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    """Return a module's outputs for xs, and the gradients of the inputs and of the stage's weights."""
    with torch.enable_grad(), untouched(stage):
        inputs = [x.detach().clone().requires_grad_(floating(x.dtype)) for x in xs]
        with around(stage):
            ys = leaves(module(packed([x.clone() for x in inputs], whole)))  # copies: it may change them in place
        return ys, differentiated(ys, gs, [*inputs, *stage.params])


def _computed(
    stage: Stage, module: Callable[[Any], Any], xs: Sequence[Tensor], gs: Sequence[Tensor], whole: bool
) -> list[Tensor | None]:
    """Return the same in one list, without what nobody needs: the gradient of the first stage's input."""
    ys, grads = _both(stage, module, xs, gs, whole)
    return [*ys, *grads[0 if stage.index else len(xs) :]]


def _as(other: nn.Module, stage: Stage, x: Any) -> Any:
    """Return the output of another stage's module with the weights of this one."""
    names = [name for name, _ in other.named_parameters()]  # in a traced model, every stage has its own names
    return functional_call(other, dict(zip(names, stage.module.parameters(), strict=True)), (x,))


def _folds(
    graphs: Graphs, weights: Sequence[Tensor], xs: Sequence[Tensor], saved: Sequence[Tensor], rows: int
) -> list[int]:
    """Return for every saved tensor the dimension of the rows, found by changing the inputs of one row."""
    if rows == 1:
        return [0] * len(saved)
    possible = [[dim for dim in range(t.dim()) if t.shape[dim] % rows == 0] for t in saved]
    for r in range(rows):
        try:
            after = graphs.forward(*weights, *_changed(xs, r, _otherwise))
        except Exception:  # an index that is out of range, say
            after = graphs.forward(*weights, *_changed(xs, r, _turned_round))
        after = after[graphs.outputs :]
        for dims, a, b in zip(possible, saved, after, strict=True):
            changed = (a != b) & ~((a != a) & (b != b))
            for dim in list(dims):
                elsewhere = unfolded(changed, dim, rows).clone()
                elsewhere[r] = False
                if elsewhere.any():
                    dims.remove(dim)
    for dims, t in zip(possible, saved, strict=True):
        if not dims:
            raise Unfit(f"torch keeps something of shape {tuple(t.shape)}, which does not fall into rows")
    # with nothing before it, the dimension is the outermost one in memory
    return [0 if prod(t.shape[: dims[0]]) == 1 else dims[0] for dims, t in zip(possible, saved, strict=True)]


def _changed(xs: Sequence[Tensor], row: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = [x.clone() for x in xs]
    for x in found:
        x[row] = change(x[row])
    return found


def _otherwise(x: Tensor) -> Tensor:
    return x.logical_not() if x.dtype == torch.bool else x + 1


def _turned_round(x: Tensor) -> Tensor:
    return x + 1 if floating(x.dtype) else x.flatten().flip(0).view(x.shape)


def examples(kind: Kind, rows: int, device: torch.device) -> list[Tensor]:
    """Return inputs (n, …) of this kind, always the same ones."""
    return [example(shape if rows == 1 else (rows, *shape), dtype, device) for shape, dtype in kind.inputs]


def example(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal numbers, always the same ones, and zeros for an integer type, which may be indices. The caller's
    random state is not changed.
    """
    if not floating(dtype):
        return torch.zeros(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)
