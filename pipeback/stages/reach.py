"""Reach: how far the gradient of each output of a stage goes, to inputs and to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """Where the gradient of one output goes: numbers of inputs, and of weights."""

    inputs: frozenset[int]
    weights: frozenset[int]


def reached(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> tuple[Reach, ...]:
    """Return the reach of each output of a stage, whose graph begins at these inputs and weights, and stays."""
    return tuple(Reach(*(_numbers(y, some) for some in (inputs, weights))) for y in outputs)


def _numbers(output: Tensor, begins: Sequence[Tensor]) -> frozenset[int]:
    """The numbers of those that get a gradient from this output."""
    moving = [n for n, t in enumerate(begins) if t.requires_grad]
    if not isinstance(output, Tensor) or not output.requires_grad or not moving:
        return frozenset()
    some, seed = [begins[n] for n in moving], torch.ones_like(output)
    grads = torch.autograd.grad(output, some, seed, retain_graph=True, allow_unused=True)
    return frozenset(n for n, g in zip(moving, grads, strict=True) if g is not None)


def lost(stages: Sequence[tuple[Reach, ...]], missing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (place of a stage, number of a weight) for all that get no gradient if these outputs of the last have none.

    stages: what the outputs of each reach, of stages in a row.
    """
    wanted = set(range(len(stages[-1]) if stages else 0)) - set(missing)
    for place in reversed(range(len(stages))):
        every, some = stages[place], [out for n, out in enumerate(stages[place]) if n in wanted]
        with_gradient = frozenset[int]().union(*(out.weights for out in some))
        for weight in sorted(frozenset[int]().union(*(out.weights for out in every)) - with_gradient):
            yield place, weight
        wanted = set().union(*(out.inputs for out in some))
