"""Waiting: the graphs for one kind of micro-batch, and the tensors that wait between the forward (F) and the backward
(B) of each.

A stage has a place p: its number s, or s // 2 where stages of even and of odd number take turns. Micro-batch i of the
stage has slot p − i. So at a tick at which a stage does F of micro-batch f − p and B of b + p, for some f and b, what
waits for the backwards of all stages is in one slot, −b; and what F keeps goes to the slots 2 p − f, which are evenly
spaced from row to row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.vectorized.tracing.forms import Kind
from pipeback.vectorized.tracing.graphs import Graph, Graphs, direct

Turns = list[tuple[int, int]]  # (row, micro-batch)


class Waiting(ABC):
    """Room for `length` micro-batches in flight at each stage of a stack. places: p of each row's stage."""

    def __init__(self, graphs: Graphs, kind: Kind, places: Sequence[int], length: int, device: torch.device) -> None:
        self.written, self.kind, self.length, self.device = graphs, kind, length, device
        self.at, self.rows = list(places), len(places)
        self.eager = graphs.each(direct)
        self.graphs = self.eager  # or these graphs compiled
        self.factors: Graph | None = None  # a backward that gives some gradients as factors
        self.factored: list[int] = []  # the numbers of these weights
        self.flights: Sequence[Any] = ()  # of each row, the flight that its stage holds of a micro-batch
        self.made: Sequence[Tensor] | None = None  # the output of `made`, where it consists of views of the weights
        self.saved: list[Tensor] = []  # the memory, if it stays in place
        self._slots: list[Tensor] = []
        self._numbers: list[Tensor] = []

    @torch.no_grad()
    def view(self, weights: Sequence[Tensor]) -> None:
        """Make the tensors that B needs of these weights once if they are views, which change with the weights."""
        made = self.written.made(*weights)
        own = {w.untyped_storage().data_ptr() for w in weights}
        self.made = made if all(t.untyped_storage().data_ptr() in own for t in made) else None

    def slot_of(self, row: int, mb: int) -> int:
        """Return the slot in which a row has a micro-batch."""
        return (self.at[row] - mb) % self.length

    def slot_at(self, b: int) -> int:
        """Return the slot that the backwards of a tick read (see below)."""
        return -b % self.length

    # -- of some rows ------------------------------------------------------------------------------------------------

    @abstractmethod
    def leave(self, saved: Sequence[Tensor], some: Turns) -> None:
        """Keep the tensors that F saves for B, of these rows."""

    @abstractmethod
    def back(self, some: Turns) -> Sequence[Tensor]:
        """Return the tensors that F has saved, of these rows; what they say of other rows is undefined."""

    @abstractmethod
    def lines(self, some: Turns) -> Tensor:
        """Return the places of these rows, as row numbers of matrices (slots · n, elements)."""

    # -- of all rows, at a tick at which a stage does F of micro-batch f − p and B of b + p ---------------------------

    @abstractmethod
    def put(self, f: int, saved: Sequence[Tensor]) -> None:
        """Keep the tensors that F saves for B at this tick."""

    @abstractmethod
    def put_at(self, places: Tensor, saved: Sequence[Tensor]) -> None:
        """Keep the tensors that F saves for B at these `places`."""

    @abstractmethod
    def left(self, b: int) -> Sequence[Tensor]:
        """Return the tensors that F has saved for the B of this tick."""

    # -- and of some neighbouring rows -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def even(self) -> bool:
        """Whether the rows lie one after the other in all tensors, so that some of them can be taken."""

    @abstractmethod
    def left_of(self, rows: tuple[int, int], shapes: Sequence[Sequence[int]], b: int) -> Sequence[Tensor]:
        """Return what F has saved for the B of this tick, of the rows from one up to another. shapes: of each."""

    @abstractmethod
    def put_of(self, rows: tuple[int, int], f: int, saved: Sequence[Tensor]) -> None:
        """Keep what F saves for B at this tick, of the rows from one up to another."""

    def places(self, f: int) -> Tensor:
        """Return the places for what F keeps at this tick, as row numbers of matrices (slots · n, elements)."""
        if not self._slots:
            every, at = (torch.tensor(numbers, device=self.device) for numbers in (range(self.rows), self.at))
            self._slots = [(2 * at - n) % self.length * self.rows + every for n in range(self.length)]
        return self._slots[f % self.length]

    def slot(self, b: int) -> Tensor:
        """Return the number of the slot that B reads, as a tensor, for a compiler."""
        if not self._numbers:
            self._numbers = list(torch.arange(self.length, device=self.device).split(1))
        return self._numbers[self.slot_at(b)]

    def grow(self, length: int) -> None:
        """Note the new number of slots."""
        self.length = length
        self._slots.clear()
        self._numbers.clear()

    # -- states and memory -------------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self, row: int, mb: int) -> list[Tensor]:
        """Return copies of what waits of a micro-batch in a row, in the order of the graph."""

    @abstractmethod
    def restore(self, row: int, mb: int, tensors: Sequence[Tensor]) -> None:
        """Put back what `tensors` gave."""

    @abstractmethod
    def longer(self, length: int, flying: Sequence[Sequence[int]]) -> None:
        """Make room for more micro-batches. flying: per row, those between F and B."""

    @abstractmethod
    def hold(self, there: bool) -> None:
        """Allocate or free the memory; nothing may wait."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of the room, for all rows."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """The bytes that wait of one micro-batch at one stage."""
