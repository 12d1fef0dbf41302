"""Stale weights check: finds functions of the weights that a graph saves. With them, the backward (B) would run on the
weights of the forward (F), even if its method asks for newer ones.

Saved tensors that depend on the weights alone are found by observing a forward (`provenance`). If they are cheap, B
recomputes them (`recomputed_functions`); otherwise the model is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.private import pytree
from pipeback.splitting.control_flow import as_written
from pipeback.splitting.provenance import WEIGHTS, Provenance
from pipeback.stages import saved_graph
from pipeback.stages.compile_check import disturb, noise, untouched
from pipeback.stages.compiled import Compiled
from pipeback.stages.flight import Value, for_trial, grown
from pipeback.stages.recomputed_functions import Afresh, looking
from pipeback.stages.stage import Stage
from pipeback.tensors import copies

_COMPILED = "Use compile=True without options of your own (compiled convolutions keep copies), or"


def guarded(stage: Stage, method: Method, delays: Sequence[int]) -> bool:
    """Whether the method wants B of a stage on other weights than F, so that its graph must not save old ones."""
    stashes = stage.keeping is None or stage.keeping.stashes
    return bool(stashes and method.copies != "stash" and delays[stage.index] and stage.weights)


def refuse(stage: Stage, value: Value, target: Any, method: Method, warn: bool) -> None:
    """Raise if the graph saves something computed from the weights alone: its backward would use old weights."""
    found = _by_numbers(stage, value, target) if isinstance(stage.call, Compiled) else _watched(stage, value, target)
    if found is not None and isinstance(stage.call, Afresh) and stage.call.casts:
        stage.call.casts = False
        found = _watched(stage, value, target)
    if found is None or _afresh(stage, value, target):
        if isinstance(stage.call, Afresh) and stage.call.casts is None:
            with untouched(stage), torch.enable_grad():
                stage.call.casts = stage.call.casts_alone(stage.enter(value)[1])
        return
    name, shape = found
    cure, why = "Use", "that is not cheap to recompute, as spectral norm and orthogonal weights do"
    if isinstance(stage.call, Compiled):
        cure = _COMPILED
    said = (
        f"{stage.label}: its graph saves a function of the weights ({name}, {shape}) {why}; {method!r} would run its "
        f'backward on old weights. {cure} method="pipedream", which means to, compute it outside the graph, or accept '
        'it with debug=pipeback.Debug(weight_functions="warn")'
    )
    if not warn:
        raise ValueError(said)
    warnings.warn(said, stacklevel=2)


def _afresh(stage: Stage, value: Value, target: Any) -> bool:
    """Let the stage recompute functions of its weights in B, if it can; return whether it does."""
    call = stage.call
    if isinstance(call, (Compiled, Afresh)):
        return False
    stage.call_by(Afresh(stage, call))
    try:
        if _watched(stage, value, target) is None:
            return True
    except Exception:
        stage.call_by(call)
        raise
    stage.call_by(call)
    return False


def _watched(stage: Stage, value: Value, target: Any) -> tuple[str, tuple[int, ...]] | None:
    """The first saved tensor that is computed from the weights alone: the node that saves it, and its shape."""
    target = for_trial(stage, target)
    torch.clear_autocast_cache()  # or a cast that was made before would come from nowhere
    try:
        with untouched(stage), torch.enable_grad():
            stage.generator.manual_seed(0)
            leaves, given = stage.enter(value)
            data = [
                *leaves,
                *copies.tensors_in(given),
                *(t for t in pytree.tree_leaves(target) if isinstance(t, Tensor)),
            ]
            with as_written(), Provenance(data, stage.params) as provenance:
                roots = grown(stage.run(given, target))
    finally:
        torch.clear_autocast_cache()
    known, made = copies.storages(list(stage.module.parameters())), set[int]()
    with looking(stage, made):
        for name, t, raw in saved_graph.saved(roots):
            if t.numel() and not copies.lies_in(t, known):
                hidden = raw is None and isinstance(stage.call, Afresh)  # what it gives was never seen
                if hidden or (not copies.lies_in(t, made) and provenance.of(t) == WEIGHTS):
                    return name, tuple(t.shape)
    return None


def _by_numbers(stage: Stage, value: Value, target: Any) -> tuple[str, tuple[int, ...]] | None:
    """The first such tensor of a compiled stage, whose operations cannot be watched: one that does not change with the
    input, but does with the weights. Weights are drawn at random for this, so that zeros (as in a residual branch at
    its start) hide nothing.
    """
    other = _other_input(value)
    if other is None:
        return None
    originals = [p.detach().clone() for p in stage.params]
    try:
        disturb(originals, stage, 1)
        first, second = _saved_floats(stage, value, target), _saved_floats(stage, other, target)
        disturb(originals, stage, 2)
        third = _saved_floats(stage, value, target)
    except Exception:
        return None  # the module does not take such an input or such weights; nothing can be said
    finally:
        torch.clear_autocast_cache()
        for p, original in zip(stage.params, originals, strict=True):
            p.data.copy_(original)
    names = [name for name, _ in first]
    if [name for name, _ in second] != names or [name for name, _ in third] != names:
        return None  # the graph depends on the data; nothing can be said
    for (name, a), (_, b), (_, c) in zip(first, second, third, strict=True):
        if copies.equal(a, b) and a.shape == c.shape and not copies.equal(a, c):
            return name, tuple(a.shape)
    return None


def _saved_floats(stage: Stage, x: Value, target: Any) -> list[tuple[str, Tensor]]:
    """Names and copies of the floating-point tensors that the graph saves, weights themselves left out."""
    torch.clear_autocast_cache()  # or it would hide that the weights have changed
    with untouched(stage):  # the same buffers and masks each time
        stage.generator.manual_seed(0)
        _, given = stage.enter(x)
        roots = grown(stage.run(given, for_trial(stage, target)))
    known = copies.storages(list(stage.module.parameters()))
    return [
        (name, t.detach().clone())
        for name, t, _ in saved_graph.saved(roots)
        if t.is_floating_point() and t.numel() and not copies.lies_in(t, known)
    ]


def _other_input(value: Value) -> Value | None:
    """Another input of the same form; None if none can be made."""
    parts = value if isinstance(value, tuple) else (value,)
    if any(p.layout is not torch.strided for p in parts):
        return None
    generator = torch.Generator().manual_seed(0)
    others = [
        p + (p.std(correction=0) + 1) * noise(p, generator) if p.is_floating_point() else p.flip(-1) if p.dim() else p
        for p in parts
    ]
    if all(copies.equal(a, b) for a, b in zip(parts, others, strict=True)):
        return None
    return tuple(others) if isinstance(value, tuple) else others[0]
