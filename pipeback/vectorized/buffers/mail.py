"""Mail: what the rows of a stack have sent to other stages that run as one, until these take it.

At one tick a row sends one value, and its receiver takes one; at most two wait. So there are two slots, each with a
place for every row, and consecutive ticks of a row use one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Value = Sequence[Tensor | None]  # the tensors of a value, (n, …) of n rows; None: no gradient


class Mail:
    """Two slots for `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._slots: list[Value] = [(), ()]
        self._own = [False, False]  # whether nobody else has the tensors

    def at(self, tick: int, *, keeps: bool = False) -> Value:
        """Return what was sent at the tick; of rows that sent nothing, it is undefined.

        keeps: whether it is needed for longer than until the next tick.
        """
        value = self._slots[tick % 2]
        return [None if t is None else t.clone() for t in value] if keeps and self._own[tick % 2] else value

    def row(self, tick: int, row: int) -> Value:
        """Return what a row sent at the tick."""
        found = [None if t is None else t[row] for t in self._slots[tick % 2]]
        return [None if t is None else t.clone() for t in found] if self._own[tick % 2] else found

    def send(self, tick: int, rows: tuple[int, int], value: Value) -> None:
        """Send something from the rows from one up to another."""
        first, end = rows
        n = tick % 2
        if end - first == self.rows:
            self._slots[n], self._own[n] = value, False
            return
        if not self._own[n]:
            kept = self._slots[n] or [None] * len(value)
            self._slots[n] = [_room(t, like, self.rows) for t, like in zip(kept, value, strict=True)]
            self._own[n] = True
        for place, t in zip(self._slots[n], value, strict=True):
            if place is not None and t is not None:
                place[first:end] = t


def _room(kept: Tensor | None, like: Tensor | None, rows: int) -> Tensor | None:
    if kept is not None:
        return kept.clone()
    return None if like is None else torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=like.device)
