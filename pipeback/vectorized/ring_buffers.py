"""Ring buffers: hold the tensors that wait between the operations of stages that run as one, per kind of micro-batch.

What the forward (F) of micro-batch i at stage s saves for its backward (B) waits in row s, slot i − s. At one tick, the
backwards of all rows are of different micro-batches, but their saved tensors lie in one slot, which is read without a
copy. Inputs (slot i + s) and gradients of outputs (slot i − s) wait in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pipeback.vectorized.graph_rewrites import Graph, Graphs, direct, factored, for_compiler

# of a micro-batch: shape, dtype, and a number: 1 in training, plus 2 for every change in what the modules compute
Kind = tuple[tuple[int, ...], torch.dtype, int]
Turns = list[tuple[int, int]]  # (row, micro-batch)
ALIGNED = 64  # bytes, the alignment of torch's tensors
MANY = 4096  # entries of the cache of places


class RingBuffers:
    """Ring buffers of `length` slots, each with `rows` rows, for one kind of micro-batch."""

    def __init__(
        self,
        graphs: Graphs,
        kind: Kind,
        saved: Sequence[Tensor],
        folds: Sequence[int],
        rows: int,
        length: int,
        device: torch.device,
    ) -> None:
        """saved: tensors like those that F saves for B. folds: for each of them, the dimension along which rows lie."""
        shape, dtype, _ = kind
        self.written, self.kind, self.rows, self.length = graphs, kind, rows, length
        self.eager = Graphs(*map(direct, graphs))
        self.graphs = self.eager  # or these graphs compiled
        self.factors: Graph | None = None  # a backward that gives some gradients as factors
        self.factored: list[int] = []  # the numbers of these weights
        self.folds, self.shapes = folds, [t.shape for t in saved]
        given = [((rows, t.numel() // rows), t.dtype) for t in saved] + [((rows, *shape), dtype)] * 2
        self._slot = [torch.empty(form, dtype=of, device="meta") for form, of in given]
        # rings of inputs and gradients: none where rows are not neighbours
        *self.saved, self.inputs, self.gradients = self._room(length, device)
        self._holds = True
        self._cuts = [(n, 0, ring.shape[-1]) for n, ring in enumerate(self.saved)]
        self.flights: Sequence[Any] = ()  # of each row, the flight that its stage holds of a micro-batch
        self.made: Sequence[Tensor] | None = None  # the output of `made`, where it consists of views of the weights
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._slots: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._left: list[list[Tensor]] = []
        self._flat: list[Tensor] = []  # the rings of saved tensors, as matrices
        # the graphs save one matrix per ring
        self._is_flat = [not dim and t.dim() == 2 and len(t) == rows for t, dim in zip(saved, folds, strict=True)]

    @property
    def parts(self) -> list[Tensor]:
        """A ring (length, n, elements) for each tensor that the graph of one stage saves."""
        return [self.saved[n][..., at : at + width] for n, at, width in self._cuts]

    def packed(self, large: Sequence[int] = ()) -> RingBuffers:
        """Return rings for graphs that save one matrix (n, elements) per dtype, into which a compiler writes directly.

        Without a compiler this would take one more copy. large: the numbers of weights whose gradients `factors` gives
        as factors.
        """
        kinds = list(dict.fromkeys(ring.dtype for ring in self.saved))
        members = [[n for n, ring in enumerate(self.saved) if ring.dtype == kind] for kind in kinds]
        widths, graphs = [ring.shape[-1] for ring in self.saved], for_compiler(self.written)
        shapes, folds, rows = self.shapes, self.folds, self.rows

        def forward(*given: Tensor) -> tuple[Tensor, ...]:
            y, *saved = graphs.forward(*given)
            flat = [unfolded(t, dim, rows) for t, dim in zip(saved, folds, strict=True)]
            return y, *(torch.cat([flat[n] for n in some], 1) for some in members)

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
            Graphs(forward, backward, graphs.made), self.kind, saved, [0] * len(saved), rows, self.length,
            self.inputs.device,
        )  # fmt: skip
        mine.factors, mine.factored = by_factors, mine_factored
        mine._cuts = [
            (k, sum(widths[m] for m in some if m < n), widths[n])
            for n in range(len(widths)) for k, some in enumerate(members) if n in some
        ]  # fmt: skip
        mine.made = self.made
        if not self._slot[-1].numel():
            mine.alone()
        return mine

    def alone(self) -> None:
        """Note that no row passes tensors to another one."""
        self._slot[-2:] = [slot[:, :0] for slot in self._slot[-2:]]
        self._holds = False
        self.hold(True)

    def leave(self, saved: Sequence[Tensor], some: Turns) -> None:
        """Keep the tensors that F saves for B."""
        each = zip(saved, self.folds, strict=True)
        self.write(self.saved, [unfolded(t, dim, self.rows) if dim else t for t, dim in each], some, -1)

    def back(self, some: Turns) -> list[Tensor]:
        """Return the tensors that F has saved, of these rows."""
        each = zip(self.read(self.saved, some, -1), self.shapes, self.folds, strict=True)
        return [folded(t, shape, dim) if dim else t.view(shape) for t, shape, dim in each]

    # -- at a tick at which row r does F of micro-batch f − r and B of b + r ---------------------------------------

    def places(self, f: int) -> Tensor:
        """Return the places for the tensors that F saves at this tick, as row numbers of the matrices."""
        if not self._slots:
            every = torch.arange(self.rows, device=self.inputs.device)
            self._slots = [(n - 2 * every) % self.length * self.rows + every for n in range(self.length)]
        return self._slots[f % self.length]

    def left(self, b: int) -> Sequence[Tensor]:
        """Return the tensors that F has saved for the B of this tick."""
        if not self._left and not any(self.folds):
            both = list(zip(self.saved, self.shapes, strict=True))
            self._left = [[ring[n].view(shape) for ring, shape in both] for n in range(self.length)]
        if self._left:
            return self._left[b % self.length]
        each = zip(self.saved, self.shapes, self.folds, strict=True)
        return [folded(ring[b % self.length], shape, dim) for ring, shape, dim in each]

    def put(self, places: Tensor, saved: Sequence[Tensor]) -> None:
        """Keep the tensors that F saves for B."""
        if not self._flat:
            self._flat = [ring.view(self.length * self.rows, -1) for ring in self.saved]
        for ring, t, dim, flat in zip(self._flat, saved, self.folds, self._is_flat, strict=True):
            ring.index_copy_(0, places, t if flat else unfolded(t, dim, self.rows) if dim else t.reshape(self.rows, -1))

    def slot(self, b: int) -> Tensor:
        """The number of the slot that B reads, as a tensor."""
        if not self._numbers:
            self._numbers = list(torch.arange(self.length, device=self.inputs.device).split(1))
        return self._numbers[b % self.length]

    def write(self, rings: Sequence[Tensor], values: Sequence[Tensor], some: Turns, sign: int) -> None:
        """Write the value of row r, for micro-batch i, to slot i + sign·r. values: (n, …)."""
        places, rows = self._places(some, sign), None if len(some) == self.rows else [r for r, _ in some]
        for ring, value in zip(rings, values, strict=True):
            value = value.reshape(self.rows, -1)
            flat = ring.view(self.length * self.rows, -1)
            flat.index_copy_(0, places, value if rows is None else value[rows])

    def read(self, rings: Sequence[Tensor], some: Turns, sign: int) -> list[Tensor]:
        """Return the values (n, elements) of these rows; those of the other rows are undefined."""
        r, i = some[0]
        slot = (i + sign * r) % self.length
        if all((i + sign * r) % self.length == slot for r, i in some):
            return [ring[slot] for ring in rings]
        places = self._places(some, sign, everywhere=True)
        return [ring.view(self.length * self.rows, -1).index_select(0, places) for ring in rings]

    def _places(self, some: Turns, sign: int, *, everywhere: bool = False) -> Tensor:
        """Return the places of these rows in a ring, as row numbers of a matrix.

        everywhere: also give any place for each of the other rows.
        """
        rows = [r for r, _ in some] if len(some) < self.rows else []
        key = (sign, everywhere, len(rows), *rows, *[i % self.length for _, i in some])
        found = self._known.get(key)
        if found is None:
            flat = {r: (i + sign * r) % self.length * self.rows + r for r, i in some}
            places = [flat.get(r, r) for r in range(self.rows)] if everywhere else list(flat.values())
            found = torch.tensor(places, device=self.inputs.device)
            if len(self._known) > MANY:
                self._known.clear()
            self._known[key] = found
        return found

    def longer(self, length: int, flying: Sequence[Sequence[int]], waiting: Sequence[Sequence[int]]) -> None:
        """Lengthen the rings. flying, waiting: per row, the micro-batches after their F, and before it."""
        kept = [*((ring, flying, -1) for ring in self.saved), (self.inputs, waiting, 1), (self.gradients, flying, -1)]
        for (old, mbs, sign), new in zip(kept, self._room(length, self.inputs.device), strict=True):
            for row, some in enumerate(mbs):
                for i in some:
                    new[(i + sign * row) % length, row] = old[(i + sign * row) % self.length, row]
            old.set_(new)  # type: ignore[call-overload]
        self.length = length
        self._forget()

    def _room(self, length: int, device: torch.device) -> list[Tensor]:
        """Return the rings in one piece of memory, which goes back to the system as a whole, unlike small pieces."""
        ends = list(accumulate(-(-slot.nbytes * length // ALIGNED) * ALIGNED for slot in self._slot))
        piece = torch.zeros(ends[-1], dtype=torch.uint8, device=device).untyped_storage()
        found = []
        for at, slot in zip([0, *ends], self._slot, strict=False):
            form = (length, *slot.shape)
            ring = torch.empty(0, dtype=slot.dtype, device=device)  # a view would keep freed memory
            found.append(ring.set_(piece, at // slot.itemsize, form, torch.empty(form, device="meta").stride()))
        return found

    def _forget(self) -> None:
        for found in (self._known, self._slots, self._numbers, self._left, self._flat):
            found.clear()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.saved, self.inputs, self.gradients))

    def hold(self, there: bool) -> None:
        """Allocate or free the memory; nothing may wait in the rings."""
        if there != self._holds:
            every = *self.saved, self.inputs, self.gradients
            for old, new in zip(every, self._room(self.length if there else 0, self.inputs.device), strict=True):
                old.set_(new)  # type: ignore[call-overload]
            self._holds = there
            self._forget()


def unfolded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Return a tensor whose rows lie along `dim` as a matrix (rows, elements)."""
    apart: Tensor = tensor.unflatten(dim, (rows, -1))
    return apart.movedim(dim, 0).reshape(rows, -1)


def folded(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return the inverse of `unfolded`."""
    rows = len(matrix)
    inner = [*shape[:dim], shape[dim] // rows, *shape[dim + 1 :]]
    return matrix.reshape(rows, *inner).movedim(0, dim).reshape(shape)
