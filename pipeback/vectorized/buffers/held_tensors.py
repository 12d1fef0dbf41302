"""Held tensors: what waits between the forward (F) and the backward (B) of a stage that runs as a graph of its own: the
tensors themselves, where rows of several stages would have to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeback.tensors.copies import replica
from pipeback.vectorized.buffers.ring_buffers import RingBuffers
from pipeback.vectorized.buffers.waiting import Turns, Waiting


class HeldTensors(Waiting):
    """The graphs of one stage, and what waits there."""

    def __init__(self, like: RingBuffers) -> None:
        """like: ring buffers that do the same with copies."""
        super().__init__(like.written, like.kind, like.at, like.length, like.device)
        self.made, self._slot_bytes = like.made, like.slot_bytes
        self._kept: list[Sequence[Tensor]] = [()] * self.length

    def leave(self, saved: Sequence[Tensor], some: Turns) -> None:
        """Keep the tensors that F saves for B."""
        self._keep(self.slot_of(*some[0]), saved)

    def back(self, some: Turns) -> Sequence[Tensor]:
        """Return the tensors that F has saved, and hold them no longer."""
        return self._taken(self.slot_of(*some[0]))

    def lines(self, some: Turns) -> Tensor:
        """Raise an error: there are no rows."""
        raise IndexError(some)

    def put(self, f: int, saved: Sequence[Tensor]) -> None:
        """Keep the tensors that F saves for B at this tick."""
        self._keep((2 * self.at[0] - f) % self.length, saved)

    def put_at(self, places: Tensor, saved: Sequence[Tensor]) -> None:
        """Raise an error: there are no rows."""
        raise IndexError(places)

    def left(self, b: int) -> Sequence[Tensor]:
        """Return the tensors that F has saved for the B of this tick, and hold them no longer."""
        return self._taken(self.slot_at(b))

    @property
    def even(self) -> bool:
        return False

    def left_of(self, rows: tuple[int, int], shapes: Sequence[Sequence[int]], b: int) -> Sequence[Tensor]:
        """Raise an error: there is one row."""
        raise IndexError(rows)

    def put_of(self, rows: tuple[int, int], f: int, saved: Sequence[Tensor]) -> None:
        """Raise an error: there is one row."""
        raise IndexError(rows)

    def _keep(self, slot: int, saved: Sequence[Tensor]) -> None:
        self._kept[slot] = saved

    def _taken(self, slot: int) -> Sequence[Tensor]:
        found, self._kept[slot] = self._kept[slot], ()
        return found

    def tensors(self, row: int, mb: int) -> list[Tensor]:
        """Return copies of what waits of a micro-batch, in the order of the graph."""
        return [replica(t) for t in self._kept[self.slot_of(row, mb)]]

    def restore(self, row: int, mb: int, tensors: Sequence[Tensor]) -> None:
        """Put back what `tensors` gave."""
        self._keep(self.slot_of(row, mb), [replica(t, self.device) for t in tensors])

    def longer(self, length: int, flying: Sequence[Sequence[int]]) -> None:
        """Make room for more micro-batches."""
        old = {i: self._kept[self.slot_of(0, i)] for i in flying[0]}
        self.grow(length)
        self._kept = [()] * length
        for i, saved in old.items():
            self._keep(self.slot_of(0, i), saved)

    def hold(self, there: bool) -> None:
        """Do nothing: memory is there while something waits."""

    @property
    def nbytes(self) -> int:
        return self._slot_bytes * sum(map(bool, self._kept))

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes
