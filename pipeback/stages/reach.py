"""Reach: how far the gradient of each output of a stage goes, to inputs and to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeback.stages.saved_graph import nodes


class Reach(NamedTuple):
    """Where the gradient of one output goes: numbers of inputs, and of weights."""

    inputs: frozenset[int]
    weights: frozenset[int]


def reached(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Reach, ...]:
    """Return the reach of each output of a stage as its graph says, which begins at these inputs and weights."""
    taken, held = ({id(t): n for n, t in enumerate(some)} for some in (inputs, weights))
    found = []
    for output in outputs:
        ends = {id(output), *(id(getattr(node, "variable", None)) for node in nodes([output]))}
        found.append(Reach(*(frozenset(n for key, n in known.items() if key in ends) for known in (taken, held))))
    return tuple(found)


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
