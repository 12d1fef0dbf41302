"""Resized: the graphs of n rows, for any other number of rows.

To trace modules takes long. Two traces, for n and for m rows, differ in some whole numbers only, such as the sizes to
which a tensor is reshaped. These grow with the rows by a fixed number each, which gives those of any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pipeback.vectorized.tracing.graph_shapes import shape_of
from pipeback.vectorized.tracing.graphs import Graph


class Otherwise(ValueError):
    """Two traces differ in more than numbers that grow with the rows."""


class Resized:
    """The graph `one` of n rows, and `other`, the same of m rows. Raises `Otherwise` if they are not."""

    def __init__(self, one: Graph, other: Graph, n: int, m: int) -> None:
        self._module: Any = one.__self__  # type: ignore[attr-defined]
        self._others = list(other.__self__.graph.nodes)  # type: ignore[attr-defined]
        self._n, self._m = n, m
        if len(self._module.graph.nodes) != len(self._others):
            raise Otherwise
        self._graph(m)
        self._known: dict[int, Graph] = {n: one}

    def at(self, rows: int) -> Graph:
        """Return the graph of so many rows."""
        if rows not in self._known:
            self._known[rows] = fx.GraphModule(self._module, self._graph(rows)).forward
        return self._known[rows]

    def outputs(self, rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs of the graph of so many rows."""
        ours, theirs = (nodes[-1].args[0] for nodes in (list(self._module.graph.nodes), self._others))
        return [self._sized(shape_of(a) or (), shape_of(b) or (), rows) for a, b in zip(ours, theirs, strict=True)]

    def _graph(self, rows: int) -> fx.Graph:
        part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, other in zip(self._module.graph.nodes, self._others, strict=True):
            if (node.op, node.target) != (other.op, other.target) or node.op == "get_attr":
                raise Otherwise
            mine = copies[node] = part.node_copy(node, lambda n: copies[n])
            mine.args = self._sized(mine.args, other.args, rows)
            mine.kwargs = self._sized(mine.kwargs, other.kwargs, rows)
        return part

    def _sized(self, ours: Any, theirs: Any, rows: int) -> Any:
        """Return for a number of rows what is `ours` for n, and `theirs` for m."""
        if isinstance(ours, fx.Node):
            return ours
        if isinstance(ours, dict):
            return {key: self._sized(value, theirs[key], rows) for key, value in ours.items()}
        if isinstance(ours, (list, tuple)):
            if not isinstance(theirs, Sequence) or len(ours) != len(theirs):
                raise Otherwise
            return type(ours)(self._sized(a, b, rows) for a, b in zip(ours, theirs, strict=True))
        if ours == theirs:
            return ours
        if type(ours) is int and type(theirs) is int and (ours - theirs) % (self._n - self._m) == 0:
            return ours + (ours - theirs) // (self._n - self._m) * (rows - self._n)
        raise Otherwise
