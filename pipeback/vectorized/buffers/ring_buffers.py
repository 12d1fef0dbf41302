"""Ring buffers: hold the tensors that wait between the operations of stages that run as one, per kind of micro-batch.

What the forward (F) of micro-batch i at stage s saves for its backward (B) waits in the row of s, slot p − i. The place
p is s, or s // 2 where stages of even and of odd number take turns. So at one tick, at which the backwards of all rows
are of different micro-batches, their saved tensors lie in one slot, which is read without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pipeback.vectorized.buffers.spread_rows import SpreadRows
from pipeback.vectorized.buffers.waiting import Turns, Waiting
from pipeback.vectorized.tracing.forms import Kind
from pipeback.vectorized.tracing.graphs import Graphs, for_compiler
from pipeback.vectorized.tracing.product_gradients import factored

ALIGNED = 64  # bytes, the alignment of torch's tensors
MANY = 4096  # entries of the cache of places


class RingBuffers(Waiting):
    """Ring buffers of `length` slots, each with a row per stage, for one kind of micro-batch."""

    def __init__(
        self,
        graphs: Graphs,
        kind: Kind,
        saved: Sequence[Tensor],
        folds: Sequence[int],
        places: Sequence[int],
        length: int,
        device: torch.device,
    ) -> None:
        """saved: tensors like those that F saves for B. folds: for each of them, the dimension along which rows lie.
        places: p of each row's stage.
        """
        super().__init__(graphs, kind, places, length, device)
        rows = self.rows
        self.folds, self.shapes = folds, [t.shape for t in saved]
        self._slot = [torch.empty(rows, t.numel() // rows, dtype=t.dtype, device="meta") for t in saved]
        self.saved = self._room(length, device)
        self._holds = True
        self._cuts = [(n, 0, ring.shape[-1]) for n, ring in enumerate(self.saved)]
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._left: list[list[Tensor]] = []
        self._to = SpreadRows([])  # the rings of saved tensors, as matrices
        # the graphs save one matrix per ring
        self._is_flat = [not dim and t.dim() == 2 and len(t) == rows for t, dim in zip(saved, folds, strict=True)]

    def packed(self, large: Sequence[int] = ()) -> RingBuffers:
        """Return rings for graphs that save one matrix (n, elements) per dtype, into which a compiler writes directly.

        Without a compiler this would take one more copy. large: the numbers of weights whose gradients `factors` gives
        as factors.
        """
        kinds = list(dict.fromkeys(ring.dtype for ring in self.saved))
        members = [[n for n, ring in enumerate(self.saved) if ring.dtype == kind] for kind in kinds]
        widths, graphs = [ring.shape[-1] for ring in self.saved], for_compiler(self.written)
        shapes, folds, rows, outputs = self.shapes, self.folds, self.rows, self.written.outputs

        def forward(*given: Tensor) -> tuple[Tensor, ...]:
            found = graphs.forward(*given)
            flat = [unfolded(t, dim, rows) for t, dim in zip(found[outputs:], folds, strict=True)]
            return *found[:outputs], *(torch.cat([flat[n] for n in some], 1) for some in members)

        factors, mine_factored = factored(graphs.backward, large)

        def unpacked(given: Sequence[Tensor]) -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for matrix, some in zip(given, members, strict=False):
                for n, part in zip(some, matrix.split([widths[n] for n in some], 1), strict=True):
                    found[n] = folded(part.contiguous(), shapes[n], folds[n])  # not all kernels look at strides
            return [*(found[n] for n in range(len(shapes))), *given[len(members) :]]

        def backward(*given: Tensor) -> Any:
            return graphs.backward(*unpacked(given))

        def by_factors(*given: Tensor) -> Any:
            return factors(*unpacked(given))

        for function in (forward, backward):
            # a code object of its own, since torch counts recompilations per code object
            function.__code__ = function.__code__.replace(co_name=function.__name__)
        saved = [torch.cat([self.saved[n][0] for n in some], 1) for some in members]
        mine = RingBuffers(
            graphs._replace(forward=forward, backward=backward), self.kind, saved, [0] * len(saved), self.at,
            self.length, self.device,
        )  # fmt: skip
        mine.factors, mine.factored = by_factors, mine_factored
        mine._cuts = [
            (k, sum(widths[m] for m in some if m < n), widths[n])
            for n in range(len(widths)) for k, some in enumerate(members) if n in some
        ]  # fmt: skip
        mine.made = self.made
        return mine

    def leave(self, saved: Sequence[Tensor], some: Turns) -> None:
        """Keep the tensors that F saves for B, of these rows."""
        places, rows = self.lines(some), None if len(some) == self.rows else [r for r, _ in some]
        for ring, t, dim in zip(self.saved, saved, self.folds, strict=True):
            value = unfolded(t, dim, self.rows)
            ring.view(self.length * self.rows, -1).index_copy_(0, places, value if rows is None else value[rows])

    def back(self, some: Turns) -> list[Tensor]:
        """Return the tensors that F has saved, of these rows; what they say of other rows is undefined."""
        slot = self.slot_of(*some[0])
        if all(self.slot_of(*one) == slot for one in some):
            found = [ring[slot] for ring in self.saved]
        else:
            places = self._places(some, everywhere=True)
            found = [ring.view(self.length * self.rows, -1).index_select(0, places) for ring in self.saved]
        each = zip(found, self.shapes, self.folds, strict=True)
        return [folded(t, shape, dim) if dim else t.view(shape) for t, shape, dim in each]

    def lines(self, some: Turns) -> Tensor:
        """Return the places of these rows, as row numbers of matrices (slots · n, elements)."""
        return self._places(some)

    # -- at a tick at which a stage with place p does F of micro-batch f − p and B of b + p -----------------------

    def left(self, b: int) -> Sequence[Tensor]:
        """Return the tensors that F has saved for the B of this tick."""
        if not self._left and not any(self.folds):
            both = list(zip(self.saved, self.shapes, strict=True))
            self._left = [[ring[n].view(shape) for ring, shape in both] for n in range(self.length)]
        if self._left:
            return self._left[self.slot_at(b)]
        each = zip(self.saved, self.shapes, self.folds, strict=True)
        return [folded(ring[self.slot_at(b)], shape, dim) for ring, shape, dim in each]

    def put(self, f: int, saved: Sequence[Tensor]) -> None:
        """Keep the tensors that F saves for B at this tick."""
        self.put_at(self.places(f), saved, f % self.length)

    def put_at(self, places: Tensor, saved: Sequence[Tensor], key: int | None = None) -> None:
        """Keep the tensors that F saves for B at these `places`. key: see `SpreadRows.put`."""
        each = zip(saved, self.folds, self._is_flat, strict=True)
        self._matrices().put([t if flat else unfolded(t, dim, self.rows) for t, dim, flat in each], places, key)

    @property
    def even(self) -> bool:
        return not any(self.folds)

    def left_of(self, rows: tuple[int, int], shapes: Sequence[Sequence[int]], b: int) -> list[Tensor]:
        """Return what F has saved for the B of this tick, of the rows from one up to another. shapes: of each."""
        first, end = rows
        every = zip(self.left(b), self.saved, shapes, strict=True)
        return [
            left.narrow(0, first, end - first)
            if len(left) == self.rows
            else ring[self.slot_at(b), first:end].view(shape)
            for left, ring, shape in every
        ]

    def put_of(self, rows: tuple[int, int], f: int, saved: Sequence[Tensor]) -> None:
        """Keep what F saves for B at this tick, of the rows from one up to another."""
        first, end = rows
        places = self.places(f)[first:end]
        self._matrices().put([t.reshape(end - first, -1) for t in saved], places)

    def _matrices(self) -> SpreadRows:
        """The rings, a line for each slot and row."""
        if not self._to.matrices:
            self._to = SpreadRows([ring.view(self.length * self.rows, -1) for ring in self.saved])
        return self._to

    def _places(self, some: Turns, *, everywhere: bool = False) -> Tensor:
        """Return the places of these rows in a ring, as row numbers of a matrix.

        everywhere: also give any place for each of the other rows.
        """
        rows = [r for r, _ in some] if len(some) < self.rows else []
        key = (everywhere, len(rows), *rows, *[i % self.length for _, i in some])
        found = self._known.get(key)
        if found is None:
            flat = {r: self.slot_of(r, i) * self.rows + r for r, i in some}
            places = [flat.get(r, r) for r in range(self.rows)] if everywhere else list(flat.values())
            found = torch.tensor(places, device=self.device)
            if len(self._known) > MANY:
                self._known.clear()
            self._known[key] = found
        return found

    def tensors(self, row: int, mb: int) -> list[Tensor]:
        """Return copies of what waits of a micro-batch in a row, in the order of the graph."""
        return [part[self.slot_of(row, mb), row].clone() for part in self._parts]

    def restore(self, row: int, mb: int, tensors: Sequence[Tensor]) -> None:
        """Put back what `tensors` gave."""
        for part, value in zip(self._parts, tensors, strict=True):
            part[self.slot_of(row, mb), row].copy_(value.flatten())

    @property
    def _parts(self) -> list[Tensor]:
        """A ring (length, n, elements) for each tensor that the graph of one stage saves."""
        return [self.saved[n][..., at : at + width] for n, at, width in self._cuts]

    def longer(self, length: int, flying: Sequence[Sequence[int]]) -> None:
        """Lengthen the rings. flying: per row, the micro-batches between F and B."""
        for old, new in zip(self.saved, self._room(length, self.device), strict=True):
            for row, some in enumerate(flying):
                for i in some:
                    new[(self.at[row] - i) % length, row] = old[self.slot_of(row, i), row]
            old.set_(new)  # type: ignore[call-overload]
        self.grow(length)
        self._forget()

    def _room(self, length: int, device: torch.device) -> list[Tensor]:
        """Return the rings in one piece of memory, which goes back to the system as a whole, unlike small pieces."""
        ends = list(accumulate(-(-slot.nbytes * length // ALIGNED) * ALIGNED for slot in self._slot))
        piece = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device).untyped_storage()
        found = []
        for at, slot in zip([0, *ends], self._slot, strict=False):
            form = (length, *slot.shape)
            ring = torch.empty(0, dtype=slot.dtype, device=device)  # a view would keep freed memory
            found.append(ring.set_(piece, at // slot.itemsize, form, torch.empty(form, device="meta").stride()))
        return found

    def _forget(self) -> None:
        self._known.clear()
        self._left.clear()
        self._to = SpreadRows([])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.saved)

    @property
    def slot_bytes(self) -> int:
        """The bytes that wait of one micro-batch at one stage."""
        return sum(slot.nbytes for slot in self._slot) // self.rows

    def hold(self, there: bool) -> None:
        """Allocate or free the memory; nothing may wait in the rings."""
        if there != self._holds:
            for old, new in zip(self.saved, self._room(self.length if there else 0, self.device), strict=True):
                old.set_(new)  # type: ignore[call-overload]
            self._holds = there
            self._forget()


def unfolded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Return a tensor whose rows lie along `dim` as a matrix (rows, elements)."""
    if not dim:
        return tensor.reshape(rows, -1)
    apart: Tensor = tensor.unflatten(dim, (rows, -1))
    return apart.movedim(dim, 0).reshape(rows, -1)


def folded(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return the inverse of `unfolded`."""
    if not dim:
        return matrix.reshape(shape)
    rows = len(matrix)
    inner = [*shape[:dim], shape[dim] // rows, *shape[dim + 1 :]]
    return matrix.reshape(rows, *inner).movedim(0, dim).reshape(shape)
