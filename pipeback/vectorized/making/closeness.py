"""Closeness: whether what graphs compute is what stages compute, but for rounding.

In half types, as under autocast, rounding may move a number over a threshold, as that of ReLU, and a gradient far away.
Then what counts is the stage in float64, which autocast leaves alone: graphs must be about as near to it as the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from pipeback.stages.run_modules import untouched
from pipeback.stages.stage import Stage
from pipeback.vectorized.tracing.forms import floating, leaves, packed
from pipeback.vectorized.tracing.graphs import Graph

# how far the gradients of both may differ, in units of the dtype's epsilon, since sums are in another order
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.complex128: 1e-10, torch.complex64: 1e-4}
ROUGH = 0.05
TIMES = 2.0  # as far from float64 as the stage
Values = Sequence[Tensor | None]


def all_alike(found: Values, wanted: Values, rough: bool, exact: Callable[[], Values | None] = lambda: None) -> bool:
    """Whether tensors are the same but for rounding. rough: something was in a half type. exact: gives `exactly`."""
    if all(alike(a, b, rough) for a, b in zip(found, wanted, strict=True)):
        return True
    true = exact() if rough else None
    return true is not None and all(
        alike(a, b, rough) or _no_further(a, b, t) for a, b, t in zip(found, wanted, true, strict=True)
    )


def exactly(
    stage: Stage, xs: Sequence[Tensor], gs: Sequence[Tensor], whole: bool, then: Callable[[Any], Any] = lambda y: y
) -> list[Tensor | None] | None:
    """Return, in float64, a stage's outputs and the gradients of its inputs and weights; None where it has none.

    gs: the gradients of the outputs. then: what is done with these, such as a loss. whole: see `Kind.packed`.
    """
    both = chain(stage.module.named_parameters(), stage.module.named_buffers())
    named = {name: _double(t).requires_grad_(t.requires_grad) for name, t in both}
    try:
        with torch.enable_grad(), untouched(stage):
            inputs = [_double(x).requires_grad_(floating(x.dtype)) for x in xs]
            ys = leaves(then(functional_call(stage.module, named, (packed([x.clone() for x in inputs], whole),))))
            trained = [named[name] for name, p in stage.module.named_parameters() if p.requires_grad]
            return [*ys, *differentiated(ys, [_double(g) for g in gs], [*inputs, *trained])]
    except Exception:  # the user's code may insist on a type, and a device may have no float64
        return None


def first(exact: Callable[[], Values | None], count: int) -> Values | None:
    """Return the first `count` of these values, if there are any."""
    values = exact()
    return None if values is None else values[:count]


def summed(every: Sequence[Callable[[], Values | None]], count: int) -> Values | None:
    """Return the sums of the last `count` values; None where some have none."""
    sums: list[Any] = [None] * count
    for values in (one() for one in every):
        if values is None:
            return None
        last = values[len(values) - count :]
        sums = [g if total is None else total + g for total, g in zip(sums, last, strict=True)]
    return sums


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone()
    return _widest(tensor) if floating(tensor.dtype) else tensor


def differentiated(ys: Sequence[Tensor], gs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of these inputs for gradients of the outputs ys."""
    some = [(y, g) for y, g in zip(ys, gs, strict=True) if y.requires_grad]
    moving = [x for x in inputs if x.requires_grad]
    if not some or not moving:
        return [None] * len(inputs)
    roots, seeds = zip(*some, strict=True)
    found = iter(torch.autograd.grad(roots, moving, seeds, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same bits, or there is neither."""
    return a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))


def near(a: Tensor | None, b: Tensor | None, rough: bool) -> bool:
    """As `alike`, where tensors may hold NaN or infinity."""
    return alike(None if a is None else a.nan_to_num(), None if b is None else b.nan_to_num(), rough)


def alike(a: Tensor | None, b: Tensor | None, rough: bool) -> bool:
    """Whether two tensors are the same but for rounding, or there is neither. rough: something was in a half type."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype:
        return False
    if not floating(b.dtype):
        return torch.equal(a, b)
    within = ROUGH if rough else CLOSE.get(a.dtype, ROUGH)
    return _far(a, b) <= within * _norm(b) + 1e-12


def _no_further(a: Tensor | None, b: Tensor | None, exact: Tensor | None) -> bool:
    """Whether `a` is about as near to the exact numbers as `b`."""
    if a is None or b is None or exact is None or a.dtype != b.dtype:
        return False
    return _far(a, exact) <= max(TIMES * _far(b, exact), ROUGH * _norm(exact))


def _far(a: Tensor, b: Tensor) -> float:
    return _norm(_widest(a) - _widest(b))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_widest(tensor.detach())))


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def rounds(*graphs: Graph) -> bool:
    """Whether these compute in a half type, as under autocast, of whatever type their outputs are."""
    nodes = chain(*(graph.__self__.graph.nodes for graph in graphs if hasattr(graph, "__self__")))
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(v, Tensor) and v.is_floating_point() and v.itemsize < 4 for v in values)
