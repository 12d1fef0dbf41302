"""Weight ring: holds the weights that the forward (F) of each micro-batch in flight used, for stages that run as one.

The weights of row r for micro-batch i lie in slot r − i. So the weights for all backwards (B) of a tick, which are
of different micro-batches, lie in one slot, and those that the forwards use are written to two evenly strided runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors.weight_list import Weights
from pipeback.vectorized.rows import Rows


class WeightRing:
    """`length` slots, each with a place for the trainable weights of every row: one ring (length, n, …) per weight."""

    def __init__(self, rows: Rows, length: int) -> None:
        self.rows, self.length = rows, length
        self.rings = [w.new_zeros(length, *w.shape) for w in rows.stepped]
        self._slots = list(zip(*self.rings, strict=True))
        self._places: list[list[Weights]] = [
            [list(row) for row in zip(*(w.unbind() for w in slot), strict=True)] for slot in self._slots
        ]
        self._numbers = torch.arange(length, device=rows.weights[0].device).split(1)
        self._ways: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    # -- at a tick at which row r does F of micro-batch f − r and B of b + r ---------------------------------------

    def keep(self, f: int) -> None:
        """Keep the weights on which F is going to run."""
        slot = -f % self.length
        if slot not in self._ways:
            self._ways[slot] = self._way(slot)
        torch._foreach_copy_(*self._ways[slot])

    def used(self, b: int) -> list[Tensor]:
        """Return all weights for B, as F used them."""
        found = list(self.rows.weights)
        for n, w in zip(self.rows.trained, self.slots(b), strict=True):
            found[n] = w
        return found

    def slots(self, b: int) -> Sequence[Tensor]:
        """Return the trainable weights for B, as F used them."""
        return self._slots[-b % self.length]

    def slot(self, b: int) -> Tensor:
        """Return the number of the slot that B reads, as a tensor; not that of `RingBuffers.slot`, for the compiler."""
        number: Tensor = self._numbers[-b % self.length]
        return number

    def _way(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return where the rows go: one run of places up to the last slot, and one from the first slot on."""
        n = len(self.rows.stages)
        turn = min(n, (self.length - slot + 1) // 2)  # rows of the first run
        runs = [(slot, 0, turn), (slot + 2 * turn - self.length, turn, n)]
        to, of = list[Tensor](), list[Tensor]()
        for ring, w in zip(self.rings, self.rows.stepped, strict=True):
            every = ring.view(self.length * n, -1)
            for at, begin, end in runs:
                if begin < end:
                    to.append(every[at * n + begin :: 2 * n + 1][: end - begin])
                    of.append(w.view(n, -1)[begin:end])
        return to, of

    # -- between runs of ticks, when the stages keep the versions ----------------------------------------------------

    def take(self) -> None:
        """Take over the versions that the stages keep."""
        for stage, i, place in self._flying():
            kept = stage.past(stage.flights[i].version)
            if kept is not place:
                torch._foreach_copy_(place, kept)

    def give(self) -> None:
        """Hand the versions in the ring back to the stages, which keep no others."""
        for stage in self.rows.stages:
            stage.versions.note_copies(stage.flights, 1.0 + len(stage.flights))
            stage.versions.put({})
        for stage, i, place in self._flying():
            stage.versions.kept[stage.flights[i].version] = place

    def _flying(self) -> Iterator[tuple[Stage, int, Weights]]:
        """Yield every stage and micro-batch in flight there, with the place for its weights."""
        for r, stage in enumerate(self.rows.stages):
            for i in stage.flights:
                yield stage, i, self._places[(r - i) % self.length][r]
