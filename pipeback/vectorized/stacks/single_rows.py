"""Single rows: F (forward) or B (backward) of one stage of a stack by itself, by the graphs of a single row.

Where micro-batches go one by one through all stages, a stack has work for one of its rows at a time. Its own graphs
would compute all of them, and drop the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from pipeback.stages.tracing_lock import TRACING
from pipeback.vectorized.buffers.waiting import Turns, Waiting
from pipeback.vectorized.making.graph_maker import GraphMaker
from pipeback.vectorized.making.sizes import Sizes
from pipeback.vectorized.steps.rows import Rows

SHARE = 4  # all rows are computed where at least one in four of them has something to do


class SingleRows:
    """The rows of a stack. places: p of each (`Waiting`)."""

    def __init__(self, rows: Rows, maker: GraphMaker, places: Sequence[int]) -> None:
        self._rows, self._maker, self._places = rows, maker, places
        self._sizes: WeakKeyDictionary[Waiting, Sizes | None] = WeakKeyDictionary()

    def sizes(self, rings: Waiting) -> Sizes | None:
        """Return graphs for fewer rows than all; None where there are none."""
        if rings not in self._sizes:
            usable = len(self._places) > 1 and self._maker.fuse is None and rings.even
            with TRACING:
                self._sizes[rings] = self._maker.sizes(rings) if usable else None
        return self._sizes[rings]

    def pay(self, rings: Waiting, count: int) -> bool:
        """Whether so many rows are better computed one after the other."""
        few = SHARE * count < len(self._places) and self._maker.plain and not self._rows.streamed
        return few and self.sizes(rings) is not None

    def forward(self, rings: Waiting, r: int, i: int, xs: Sequence[Tensor]) -> list[Tensor]:
        """Do F of micro-batch i at row r; return its output."""
        sizes = self._sizes[rings]
        assert sizes is not None
        graphs, _ = sizes.at(1)
        found = graphs.forward(*self._weights(r), *(x[None].contiguous() for x in xs))
        rings.put_of((r, r + 1), i + self._places[r], found[graphs.outputs :])
        return [y[0] for y in found[: graphs.outputs]]

    def back(
        self, rings: Waiting, some: Turns, came: Mapping[int, Sequence[Any]]
    ) -> tuple[list[dict[int, Any]], dict[int, list[Tensor | None]]]:
        """Do B of these rows; return the gradients of each weight by rows, and those of the inputs of each row.

        came: what each micro-batch gets back.
        """
        gives = rings.written.gives
        found = {r: self.backward(rings, r, i, [came[i][n] for n in gives]) for r, i in some}
        grads = [{r: mine[n] for r, (mine, _) in found.items()} for n in range(len(self._rows.weights))]
        return grads, {r: gxs for r, (_, gxs) in found.items()}

    def backward(
        self, rings: Waiting, r: int, i: int, gs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Do B of micro-batch i at row r; return the gradients of all weights and of its input. gs: of its output."""
        sizes, weights = self._sizes[rings], self._weights(r)
        assert sizes is not None
        graphs, _ = sizes.at(1)
        saved = rings.left_of((r, r + 1), sizes.saved(1), i - self._places[r])
        found = [
            None if g is None else g[0]
            for g in graphs.backward(*saved, *graphs.made(*weights), *(g[None].contiguous() for g in gs))
        ]
        return found[: len(weights)], found[len(weights) :]

    def _weights(self, r: int) -> list[Tensor]:
        return [w[r : r + 1] for w in self._rows.weights]
