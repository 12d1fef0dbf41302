"""Sizes: the graphs of a stack for fewer rows than it has, made from two traces."""

from __future__ import annotations

from collections.abc import Sequence

from pipeback.vectorized.making.resized import Resized
from pipeback.vectorized.tracing.graphs import Graph, Graphs, direct
from pipeback.vectorized.tracing.product_gradients import accumulating


class Sizes:
    """The graphs `one` of n rows for any number of rows. other: the same for m rows. Raises `Otherwise` if they differ.

    weights: their number. trained: the numbers of those that train.
    """

    def __init__(self, one: Graphs, other: Graphs, n: int, m: int, weights: int, trained: Sequence[int]) -> None:
        self._like = one
        self._each = [
            Resized(direct(a), direct(b), n, m)
            for a, b in (
                (one.forward, other.forward), (one.backward, other.backward), (one.made, other.made),
                (accumulating(one, weights, trained), accumulating(other, weights, trained)),
            )
        ]  # fmt: skip
        self._known: dict[int, tuple[Graphs, Graph]] = {}
        self._saved: dict[int, list[tuple[int, ...]]] = {}

    def at(self, rows: int) -> tuple[Graphs, Graph]:
        """Return the graphs for so many rows, and the backward with momentum."""
        if rows not in self._known:
            forward, backward, made, accumulate = (each.at(rows) for each in self._each)
            self._known[rows] = self._like._replace(forward=forward, backward=backward, made=made), accumulate
        return self._known[rows]

    def saved(self, rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of what F of so many rows saves for B."""
        if rows not in self._saved:
            self._saved[rows] = self._each[0].outputs(rows)[self._like.outputs :]
        return self._saved[rows]
