"""Shared graphs: the forward (F) and the backward (B) of one stage, or of the last one with its loss, for any number of
micro-batches at once, which share its weights.

Two traces give the graphs of every number (`resized`), or each number has a trace of its own where they differ in more.
Before they are used for a number of micro-batches, they are compared with the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.making.resized import Otherwise, Resized
from pipeback.vectorized.making.side_effects import check_plain, traced
from pipeback.vectorized.making.verify import captured, losses_alike, shared_alike
from pipeback.vectorized.tracing.capture import capture_losses
from pipeback.vectorized.tracing.forms import Kind, leaves, packed
from pipeback.vectorized.tracing.graphs import Graph, Graphs, direct
from pipeback.vectorized.tracing.split_graph import recomputing

FEW, MORE = 3, 4  # the numbers of micro-batches that are traced


class SharedGraphs:
    """The graphs of the last of `stages`, which are alike, for one kind of micro-batch; no stage has the loss.

    xs: the input tensors of one micro-batch. Raises `Unfit` where they cannot be traced.
    """

    def __init__(self, stages: Sequence[Stage], xs: Sequence[Tensor], kind: Kind) -> None:
        self._stages, self._xs, self.kind = list(stages), xs, kind
        self._known: BoundedCache[int, Graphs] = BoundedCache()
        few, more = self._traced(FEW), self._traced(MORE)
        self._like = few
        self._resized: list[Resized] = []
        try:
            pairs = (few.forward, more.forward), (few.backward, more.backward), (few.made, more.made)
            self._resized = [Resized(direct(a), direct(b), FEW, MORE) for a, b in pairs]
        except Otherwise:
            pass

    def at(self, count: int, xs: Sequence[Tensor]) -> Graphs:
        """Return the graphs of so many micro-batches. xs: (count, …), inputs of the last stage. Raises `Unfit` where
        they compute something else than the stages.
        """
        if count not in self._known:
            graphs = self._made(count)
            if self._stages[-1].keeping is not None:
                graphs = recomputing(graphs)
            shared_alike(self._stages[-1], graphs, xs, whole=self.kind.packed)
            self._known[count] = graphs
        return self._known.used(count)

    def _made(self, count: int) -> Graphs:
        if self._resized:
            try:
                forward, backward, made = (each.at(count) for each in self._resized)
                return self._like._replace(forward=forward, backward=backward, made=made)
            except Otherwise:
                self._resized = []
        return self._traced(count).each(direct)

    def _traced(self, count: int) -> Graphs:
        weights = [p.detach() for p in self._stages[-1].module.parameters()]
        return captured(self._stages, weights, self._xs, self.kind, count, products=False, shared=True)


class SharedLosses:
    """The graphs of the last stage with its loss, for one form of micro-batch and target.

    x, target: of one micro-batch. Raises `Unfit` where they cannot be traced.
    """

    def __init__(self, stage: Stage, x: Any, target: Tensor) -> None:
        self._stage, self._xs, self._target = stage, leaves(x), target
        self.inputs, self.packed = len(self._xs), type(x) is tuple
        self._clones = check_plain([stage], x).clones
        self._known: BoundedCache[int, Graph] = BoundedCache()
        self._resized: Resized | None = None
        few, more = self._traced(FEW), self._traced(MORE)
        with suppress(Otherwise):
            self._resized = Resized(direct(few), direct(more), FEW, MORE)

    def at(self, count: int, xs: Sequence[Tensor], target: Tensor) -> Graph:
        """Return the graph of so many micro-batches, like these. Raises `Unfit` where it computes something else."""
        if count not in self._known:
            graph = self._made(count)
            losses_alike(self._stage, graph, xs, target, whole=self.packed)
            self._known[count] = graph
        return self._known.used(count)

    def _made(self, count: int) -> Graph:
        if self._resized is not None:
            try:
                return self._resized.at(count)
            except Otherwise:
                self._resized = None
        return direct(self._traced(count))

    def _traced(self, count: int) -> Graph:
        stage = self._stage
        assert stage.loss is not None
        xs, target = (
            [t.detach().unsqueeze(0).expand(count, *t.shape).contiguous() for t in some]
            for some in (self._xs, [self._target])
        )
        how: Any = {"whole": self.packed, "clones": self._clones, "casts": stage.learnt.casts}
        with traced(stage.module):
            return capture_losses(stage.module, stage.loss, xs, target[0], **how)


def together(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of values of one form as (n, …)."""
    return [torch.stack(list(same)) for same in zip(*map(leaves, values), strict=True)]


def apart(tensors: Sequence[Tensor | None], count: int, whole: bool) -> list[Any]:
    """Return tensors (n, …) as `count` values. whole: whether each is a tuple."""
    each = [[None] * count if t is None else t.unbind() for t in tensors]
    return [packed([some[n] for some in each], whole) for n in range(count)]
