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
from typing import Any

from torch import Tensor

from pipeback.private import gradient_hooks, run_backward
from pipeback.stages.flight import Flight, Value
from pipeback.stages.gradients import Gradients, differentiate, identities, own
from pipeback.stages.graph_cuts import Cuts, cut_again
from pipeback.stages.intercepted import taking
from pipeback.stages.postponed import Postponed, SplitBackward, WeightPass


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
        cuts = split.kept_whole(stage, flight) or cut_again(split.forms, roots, leaves, stage.params, late=split.late)
    if isinstance(cuts, str):
        split.why = cuts
        if split.late:
            apart = _apart(stage)
            differentiate(roots, seeds, flight.leaves, [apart])
            split.wait(mb, Postponed(None, ((), ()), flight.options, number, apart.values))
            return flight.upstream()
        finish(stage)  # its gradients come after those that wait
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
        pairs = zip(stage.params, rest.found, strict=True)
        stage.gradients.add([g if p.requires_grad else None for p, g in pairs])
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
    """Add the gradients of a micro-batch; in a thread of our own, where the user may clear `.grad`, by hand. Weights
    that were frozen since I get none.
    """
    trained = [part._replace(params=[p for p in part.params if p.requires_grad]) for part in parts]
    parts = [part for part in trained if part.params]
    if gradients.threaded and not any(gradient_hooks(p) for p in gradients.params):
        if (hooks := gradients.intercepts()) is not None:
            with taking([hooks]):
                for part in parts:
                    _run(part, accumulate=True)
            return
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
