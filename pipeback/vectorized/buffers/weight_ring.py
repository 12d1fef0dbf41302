"""Weight ring: holds the weights that the forward (F) of each micro-batch in flight used, for stages that run as one.

The weights of a stage for micro-batch i lie in slot p − i, as in `ring_buffers`. So the weights for all backwards (B)
of a tick, which are of different micro-batches, lie in one slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors.weight_list import Weights
from pipeback.vectorized.buffers.spread_rows import SpreadRows
from pipeback.vectorized.buffers.waiting import Turns, Waiting
from pipeback.vectorized.steps.rows import Rows


class WeightRing:
    """As many slots as `like` has, each with a place for the trainable weights of every row: one ring (slots, n, …) per
    weight.
    """

    def __init__(self, rows: Rows, like: Waiting) -> None:
        self.rows, self.like, self.length = rows, like, like.length
        self.owned = False  # whether what is kept are shifted weights, which are no versions
        self.rings = [_ring(w, self.length, alone=len(rows.stages) == 1) for w in rows.stepped]
        self._slots = [tuple(ring[n] for ring in self.rings) for n in range(self.length)]
        self._places: list[list[Weights]] = [
            [[rows.of(w)[r] for w in slot] for r in range(len(rows.stages))] for slot in self._slots
        ]
        # of more than one row, matrices (n, elements) and (slots · n, elements) of each weight, copied from and to
        n, several = len(rows.stages), rows.stepped if len(rows.stages) > 1 else []
        self._from = [w.view(n, -1) for w in several]
        self._to = SpreadRows([ring.view(self.length * n, -1) for ring in self.rings[: len(several)]])

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    # -- at a tick at which a stage with place p does F of micro-batch f − p and B of b + p -----------------------

    def keep(self, f: int, shifted: Sequence[Tensor] | None = None, rows: tuple[int, int] | None = None) -> None:
        """Keep the weights on which F is going to run. shifted: these, if they are not the newest. rows: they are those
        of the rows from one up to another; None: of all.
        """
        if len(self.rows.stages) == 1 or not self.rings:
            self.keep_of([(0, f - self.like.at[0])], shifted)
            return
        if rows is None:
            self._keep(self.like.places(f), shifted, key=f % self.length)
        else:
            self._keep(self.like.places(f)[slice(*rows)], shifted, slice(*rows))

    def keep_of(self, turns: Turns, shifted: Sequence[Tensor] | None = None) -> None:
        """Keep the weights on which F of these (row, micro-batch) is going to run, one of each row."""
        if self.rings and not self._from:
            source = self.rows.stepped if shifted is None else list(shifted)
            torch._foreach_copy_(self._slots[self.like.slot_of(*turns[0])], source)
        self._keep(self.like.lines(turns) if self._from else None, shifted)

    def _keep(
        self, places: Any, shifted: Sequence[Tensor] | None, some: slice = slice(None), key: int | None = None
    ) -> None:
        self.owned = shifted is not None
        if shifted is None:
            self._to.put([w[some] for w in self._from], places, key)
        elif self._from:
            self._to.put([w.view(len(w), -1) for w in shifted], places, key)

    def used(self, b: int, rows: tuple[int, int] | None = None) -> list[Tensor]:
        """Return all weights for B, as F used them."""
        found, some = list(self.rows.weights), self.slots(b)
        if rows is not None:
            found, some = [w[slice(*rows)] for w in found], [w[slice(*rows)] for w in some]
        for n, w in zip(self.rows.trained, some, strict=True):
            found[n] = w
        return found

    def used_of(self, turns: Turns) -> list[Tensor]:
        """Return all weights for B of these (row, micro-batch), one of each row."""
        found = list(self.rows.weights)
        if self._from:
            lines = self.like.lines(turns)
            every = zip(self._to.matrices, self.rings, strict=True)
            some = [to.index_select(0, lines).view(ring.shape[1:]) for to, ring in every]
        else:
            some = list(self._slots[self.like.slot_of(*turns[0])])
        for n, w in zip(self.rows.trained, some, strict=True):
            found[n] = w
        return found

    def slots(self, b: int) -> Sequence[Tensor]:
        """Return the trainable weights for B, as F used them."""
        return self._slots[self.like.slot_at(b)]

    def slot(self, b: int) -> Tensor:
        """Return the number of the slot that B reads, as a tensor, for the compiler."""
        return self.like.slot(b)

    # -- between runs of ticks, when the stages keep the versions ----------------------------------------------------

    def take(self) -> None:
        """Take over the versions that the stages keep."""
        for stage, i, place in self._flying() if self.rings else ():
            kept = stage.used(i)
            if kept is not place:
                torch._foreach_copy_(place, kept)

    def give(self) -> None:
        """Hand the versions in the ring back to the stages, which keep no others."""
        for stage in self.rows.stages:
            stage.versions.note_copies(stage.flights, 1.0 + len(stage.flights) + stage.versions.hands)
            stage.versions.put({})
        for stage, i, place in self._flying():
            if self.owned:
                stage.versions.own(stage.flights[i], place)
            else:
                stage.versions.kept[stage.flights[i].version] = place

    def _flying(self) -> Iterator[tuple[Stage, int, Weights]]:
        """Yield every stage and micro-batch in flight there, with the place for its weights."""
        for r, stage in enumerate(self.rows.stages):
            for i in stage.flights:
                yield stage, i, self._places[self.like.slot_of(r, i)][r]


def _ring(w: Tensor, length: int, *, alone: bool) -> Tensor:
    """Return room for `length` weights like w, each of which lies in memory as w does if w has no rows."""
    strides = w.stride()
    order = sorted(range(w.dim()), key=lambda dim: -strides[dim]) if alone else list(range(w.dim()))
    found = w.new_zeros(length, *(w.shape[dim] for dim in order))
    back = [order.index(dim) for dim in range(w.dim())]
    return found.permute(0, *(dim + 1 for dim in back))
