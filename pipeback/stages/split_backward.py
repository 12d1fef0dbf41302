"""Split backward: I, the gradient of a stage's input, and W, that of its weights, as two operations.

    B(i)    dx, dw ← backward(dy)              I(i)    dx ← backward(dy), and γ of every cut
                                               W(i)    dw ← the rest of the backward, from the γ

A *cut* is a node of the graph on the way to the input from which another way leads to weights alone: of y = Wh + b, the
node that knows how to get dW from dy. I goes the way to the input, and on the way keeps γ, the gradient that came to
each cut. W begins at the cuts and goes the ways to the weights. So both together do what B does, once, and every sum is
made in B's order: the bits are the same. Cuts that lie one after the other are different calls of autograd, since a
call that began at both would go from one to the other.

A graph is kept whole from F to W. Where it cannot be split, I does what B does, and W nothing: `why` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeback.private import gradient_hooks, run_backward
from pipeback.stages.flight import Flight, Value
from pipeback.stages.gradients import Gradients, differentiate, identities, own
from pipeback.stages.postponed import Postponed, SplitBackward, WeightPass


class Cuts(NamedTuple):
    """Where a graph is cut."""

    edges: Sequence[GradientEdge]  # at which I keeps gradients
    levels: Sequence[int]  # of each: how many cuts at most lie before it
    params: dict[int, list[Tensor]]  # those that W reaches from the cuts of a level
    roots: Sequence[int]  # the outputs from which no way leads to the input


def of_input(stage: Any, mb: int, grad: Value, number: float = 1.0) -> Value:
    """I(mb): return the gradient of the input, and keep what W needs. number: what the micro-batch counts as."""
    split: SplitBackward = stage.gradients.split
    roots: list[Any] = []
    seeds: list[Tensor] = []
    flight: Flight = stage.begin_backward(mb, grad, roots, seeds)
    leaves = [leaf for leaf in flight.leaves if leaf.requires_grad]
    split.why = ""
    if not leaves and not split.late:
        split.wait(mb, Postponed(None, (roots, seeds), flight.options, number))
        return flight.upstream()
    cuts: Cuts | str = ""  # no other stage waits for the first one
    if leaves:
        cuts = split.kept_whole(stage, flight) or cut(roots, leaves, stage.params, late=split.late)
    if isinstance(cuts, str):
        split.why = cuts
        if split.late:
            apart = _apart(stage)
            differentiate(roots, seeds, flight.leaves, [apart])
            split.wait(mb, Postponed(None, ((), ()), flight.options, number, apart.values))
            return flight.upstream()
        differentiate(roots, seeds, flight.leaves, [stage.gradients])
        stage.gradients.count_more(number - 1)
        return stage.end_backward(flight)
    found: Sequence[Tensor | None] = ()
    if roots:
        found = run_backward(
            tuple(roots), tuple(seeds), True, False, (*leaves, *cuts.edges), allow_unreachable=True,
            accumulate_grad=False,
        )  # fmt: skip
    seen = identities(seeds)
    for leaf, g in zip(leaves, found, strict=False):
        leaf.grad = None if g is None else own(leaf, g.detach(), seen)
    parts = _parts(cuts, roots, seeds, found[len(leaves) :])
    split.wait(mb, Postponed(parts, ((), ()), flight.options, number))
    return flight.upstream()


def of_weights(stage: Any, mb: int) -> None:
    """W(mb): add the gradients of the weights to their sums, unless that was done with I."""
    rest: Postponed | None = stage.gradients.split.waiting.pop(mb, None)
    if rest is None:
        return
    if rest.found is not None:
        stage.gradients.adopt()
        stage.gradients.add(rest.found)
        stage.gradients.show()
    elif rest.parts is None:
        differentiate(*rest.whole, (), [stage.gradients])
    else:
        _finish(rest.parts, stage.gradients)
    stage.gradients.count_more(rest.number)
    stage.went_backward(rest.options)


def finish(stage: Any) -> None:
    """Do what is left of every backward, so that no graph waits for W; the gradients are added now if they may be."""
    split: SplitBackward = stage.gradients.split
    for mb, rest in sorted(split.waiting.items()):
        if not split.late:
            of_weights(stage, mb)
        elif rest.found is None:
            apart = _apart(stage)
            _finish(rest.parts or (), apart)
            split.waiting[mb] = rest._replace(parts=None, found=apart.values)


def _apart(stage: Any) -> Gradients:
    """Where the gradients of one micro-batch are put, and not into the sums."""
    stage.gradients.adopt()
    apart = Gradients(stage.params)
    apart.share(stage.gradients.threaded)
    return apart


def _parts(
    cuts: Cuts, roots: Sequence[Any], seeds: Sequence[Tensor], found: Iterable[Tensor | None]
) -> list[WeightPass]:
    parts = [WeightPass([], [], params) for _, params in sorted(cuts.params.items())]
    place = {level: n for n, level in enumerate(sorted(cuts.params))}
    come = list(zip(cuts.edges, cuts.levels, found, strict=False))
    come += [(roots[n], 0, seeds[n]) for n in cuts.roots]
    for edge, level, g in come:
        if g is not None and level in place:
            parts[place[level]].edges.append(edge)  # type: ignore[attr-defined]
            parts[place[level]].seeds.append(g)  # type: ignore[attr-defined]
    return [part for part in parts if part.edges]


def _finish(parts: Sequence[WeightPass], gradients: Gradients) -> None:
    """Add the gradients of a micro-batch; in a thread of our own, where the user may clear `.grad`, by hand."""
    if gradients.threaded and not any(gradient_hooks(p) for p in gradients.params):
        grads: dict[int, Tensor] = {}
        for part in parts:
            seen = identities(part.seeds)
            for p, g in zip(part.params, _run(part, accumulate=False), strict=True):
                if g is not None:
                    grads[id(p)] = own(p, g.detach(), seen)
        gradients.add([grads.get(id(p)) for p in gradients.params])
        gradients.show()
        return
    gradients.lend()
    try:
        for part in parts:
            _run(part, accumulate=True)
    finally:
        gradients.keep()


def _run(part: WeightPass, *, accumulate: bool) -> Any:
    return run_backward(
        tuple(part.edges), tuple(part.seeds), False, False, tuple(part.params), allow_unreachable=True,
        accumulate_grad=accumulate,
    )  # fmt: skip


_INPUT, _WEIGHTS = 1, 2  # what a way leads to
# where an update may come before W: nodes whose gradients of weights do not depend on weights, and views of weights
_BY_INPUT = (
    "Add", "AddmmBackward", "Bmm", "Baddbmm", "Cat", "Convolution", "CudnnBatchNorm", "CudnnConvolution", "Embedding",
    "Linear", "MkldnnLinear", "Mm", "Mul", "NativeBatchNorm", "NativeGroupNorm", "NativeLayerNorm", "Stack", "Sub",
    "UnsafeView",
)  # fmt: skip
_VIEWS = (
    "AccumulateGrad", "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "Squeeze", "TBackward", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_FUSED = "MkldnnRnn", "CudnnRnn", "MiopenRnn", "ThnnFused"  # nodes that compute the gradients of both in one kernel


def cut(roots: Sequence[Any], leaves: Sequence[Tensor], params: Sequence[Tensor], *, late: bool = False) -> Cuts | str:
    """Where to cut the graph between these outputs and leaves, the inputs; or what keeps it whole, in words.

    late: whether the weights may be others at W.
    """
    starts = [y if isinstance(y, GradientEdge) else get_gradient_edge(y) for y in roots]
    given, own_ones = {id(leaf) for leaf in leaves}, {id(p) for p in params}
    nexts: dict[Any, list[Any]] = {}
    ways: dict[Any, int] = {}  # of every node; a node stands behind those that it leads to
    outputs: dict[Any, set[int]] = {}
    for edge in starts:
        outputs.setdefault(edge.node, set()).add(edge.output_nr)
    todo = [edge.node for edge in starts]
    while todo:
        node = todo[-1]
        if node in ways:
            todo.pop()
            continue
        if node not in nexts:
            if isinstance(node, FunctionCtx):
                return f"{type(node).__name__.removesuffix('Backward')} is an autograd function of its own"
            if (name := type(node).__name__).startswith(_FUSED):
                return f"{name.removesuffix('Backward0')} computes both at once"
            there = nexts[node] = [edge for edge in node.next_functions if edge[0] is not None]
            for after, nr in there:
                outputs.setdefault(after, set()).add(nr)
            new = [after for after, _ in there if after not in ways]
            if new:
                todo += new
                continue
        todo.pop()
        way = 0
        for after, _ in nexts[node]:
            way |= ways[after]
        if not nexts[node] and (leaf := getattr(node, "variable", None)) is not None:
            if id(leaf) not in given and id(leaf) not in own_ones:
                return "something that is no weight needs a gradient"
            way = _INPUT if id(leaf) in given else _WEIGHTS
        ways[node] = way
    cuts = _levels(starts, nexts, ways, outputs)
    if late and not isinstance(cuts, str):
        at = {edge.node for edge in cuts.edges}
        asked = [(node, _BY_INPUT) for node in at] + [(node, _VIEWS) for node, way in ways.items() if way == _WEIGHTS]
        for node, known in asked:
            if not (name := type(node).__name__).startswith(known):
                return f"{name.removesuffix('Backward0')} may need the weights again, and these are updated before"
    return cuts


def _levels(
    starts: Sequence[GradientEdge], nexts: dict[Any, list[Any]], ways: dict[Any, int], outputs: dict[Any, set[int]]
) -> Cuts | str:
    cuts = Cuts([], [], {}, [n for n, edge in enumerate(starts) if ways[edge.node] == _WEIGHTS])
    depth: dict[Any, int] = {}  # of nodes on the way to the input: cuts before them
    # of nodes that lead to weights alone: the depth of the cut that leads to them
    level: dict[Any, int] = {starts[n].node: 0 for n in cuts.roots}
    for node, way in reversed(ways.items()):
        if way & _INPUT:
            here = depth.get(node, 0)
            beside = [after for after, _ in nexts[node] if ways[after] == _WEIGHTS]
            deeper = here + bool(beside)
            for after, _ in nexts[node]:
                if ways[after] & _INPUT and depth.get(after, 0) < deeper:
                    depth[after] = deeper
            if beside:
                some = [GradientEdge(node, nr, None) for nr in sorted(outputs[node])]
                cuts.edges.extend(some)  # type: ignore[attr-defined]
                cuts.levels.extend([here] * len(some))  # type: ignore[attr-defined]
        elif way == _WEIGHTS:
            here = level[node]
            beside = [after for after, _ in nexts[node] if ways[after] == _WEIGHTS]
            if not nexts[node]:
                cuts.params.setdefault(here, []).append(node.variable)
        else:
            continue
        if any(level.setdefault(after, here) != here for after in beside):
            return "a weight is used again on what was computed with it"
    return cuts
