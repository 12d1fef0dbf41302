"""Stack: neighbouring stages that are alike, whose F or B at one tick run as one, each on its own micro-batch.

The weights of the stages are rows of tensors (n, …), so that methods and optimizers see what they always see, while F
and B are each one graph over all rows (`capture`). What F of stage s leaves to B waits in a ring: row s of it lies at
slot i − s of micro-batch i, so that the rows that a backward needs at one tick, each of another micro-batch, are one
slot, read without a copy. Inputs (slot i + s) and gradients (slot i − s) wait likewise. Rows that have nothing to do at
a tick are computed, too, and dropped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.capture import Graphs, Unfit, capture
from pipeback.inflight import untouched
from pipeback.joint import hooked
from pipeback.link import Link, Message, Name
from pipeback.momentum import plain_sgd
from pipeback.order import Ops
from pipeback.stage import Flight, Stage

Kind = tuple[tuple[int, ...], torch.dtype, bool]  # of a micro-batch: its shape and type, and whether it trains
Compile = Callable[[Any], Any]
Rows = list[tuple[int, int]]  # (row, micro-batch)
# how far gradients of both may lie apart, by what a number can be told from 1: sums are made in another order
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUGH = 0.05
MANY = 4096  # places that are remembered


class Row(NamedTuple):
    """What F of a stacked stage has left to B: a row of a stack."""

    stack: Stack
    kind: Kind
    number: int

    def tensors(self, mb: int) -> list[Tensor]:
        """Copies of a micro-batch's, in the order of the graph."""
        rings, at = self.stack.rings(self.kind), mb - self.number
        return [ring[at % len(ring), self.number].clone() for ring in rings.saved]


class Rings:
    """What waits between the operations of a stack, for micro-batches of one kind."""

    def __init__(
        self, graphs: Graphs, kind: Kind, saved: Sequence[Tensor], folds: Sequence[int], rows: int, length: int
    ) -> None:
        """folds: the dimension of every saved tensor that the rows lie along."""
        shape, dtype, _ = kind
        self.graphs, self.kind, self.rows, self.length = graphs, kind, rows, length
        self.folds, self.shapes = folds, [t.shape for t in saved]
        device = saved[0].device
        self.saved = [torch.zeros(length, rows, t.numel() // rows, dtype=t.dtype, device=device) for t in saved]
        self.inputs = torch.zeros(length, rows, *shape, dtype=dtype, device=device)
        self.gradients = torch.zeros(length, rows, *shape, dtype=dtype, device=device)
        self.places: list[Row] = []
        self.made: Sequence[Tensor] | None = None  # what B needs of the weights, where it is views of them
        self._known: dict[tuple[int, ...], Tensor] = {}

    def leave(self, saved: Sequence[Tensor], some: Rows) -> None:
        """Keep what F leaves to B."""
        folded = zip(saved, self.folds, strict=True)
        self.write(self.saved, [_unfolded(t, dim, self.rows) if dim else t for t, dim in folded], some, -1)

    def back(self, some: Rows) -> tuple[list[Tensor], Tensor]:
        """What F has left, and the gradients of the outputs."""
        *saved, g = self.read([*self.saved, self.gradients], some, -1)
        each = zip(saved, self.shapes, self.folds, strict=True)
        found = [_folded(t, shape, dim) if dim else t.view(shape) for t, shape, dim in each]
        return found, g.view(self.gradients.shape[1:])

    def write(self, rings: Sequence[Tensor], values: Sequence[Tensor], some: Rows, sign: int) -> None:
        """Put the value (n, …) of row r, of micro-batch i, to slot i + sign·r."""
        places, rows = self._places(some, sign), None if len(some) == self.rows else [r for r, _ in some]
        for ring, value in zip(rings, values, strict=True):
            value = value.reshape(self.rows, -1)
            flat = ring.view(self.length * self.rows, -1)
            flat.index_copy_(0, places, value if rows is None else value[rows])

    def read(self, rings: Sequence[Tensor], some: Rows, sign: int) -> list[Tensor]:
        """The values (n, elements) of these rows, and whatever lies there for the others."""
        r, i = some[0]
        slot = (i + sign * r) % self.length
        if all((i + sign * r) % self.length == slot for r, i in some):
            return [ring[slot] for ring in rings]
        places = self._places(some, sign, everywhere=True)
        return [ring.view(self.length * self.rows, -1).index_select(0, places) for ring in rings]

    def _places(self, some: Rows, sign: int, *, everywhere: bool = False) -> Tensor:
        """Where these rows lie in a ring, as rows of a matrix; everywhere: and some place for every other row."""
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
        """Make room. flying, waiting: the micro-batches of every row that have gone forward, or are yet to."""
        for tensors, mbs, sign in (
            ([*self.saved, self.gradients], flying, -1), ([self.inputs], waiting, 1),
        ):  # fmt: skip
            for old in tensors:
                new = old.new_zeros(length, *old.shape[1:])
                for row, some in enumerate(mbs):
                    for i in some:
                        new[(i + sign * row) % length, row] = old[(i + sign * row) % self.length, row]
                old.set_(new)  # type: ignore[call-overload]
        self.length = length
        self._known.clear()


class Stack:
    """`stages`, upstream first. length: micro-batches in flight at a stage, to begin with; compile: of both graphs."""

    def __init__(self, stages: Sequence[Stage], length: int, compile: Compile | None = None) -> None:
        self.stages, self.rows = list(stages), len(stages)
        self.first, self.last = stages[0].index, stages[-1].index
        self.numbers = range(self.first, self.last + 1)
        self.calls = [stage.call for stage in stages]  # what they do on their own
        self._length, self._compile = length, compile
        self._kinds: dict[int, Kind] = {}  # of the micro-batches between F of the first stage and B of it
        self._rings: dict[Kind, Rings] = {}
        self.weights = self._stacked()
        self.sums: list[Tensor] | None = None  # of gradients of all stages, where none has its own
        self._options: Any = None
        self._same: dict[str, Any] | None = None  # what all weights are stepped with
        self._velocities: list[Tensor] = []
        self._first_rows: Sequence[Tensor | None] = [None] * self.rows  # of the first weight's
        self.trained = [n for n, p in enumerate(stages[0].module.parameters()) if p.requires_grad]

    @torch.no_grad()
    def _stacked(self) -> list[Tensor]:
        """The weights of all stages, as rows of tensors; the stages' own are these rows from now on."""
        found = []
        for same in zip(*(list(stage.module.parameters()) for stage in self.stages), strict=True):
            whole = torch.stack([p.data for p in same])
            for p, row in zip(same, whole.unbind(), strict=True):
                p.data = row
            found.append(whole)
        for stage in self.stages:
            stage.moved()
        return found

    @property
    def known(self) -> Kind:
        """The kind of micro-batch that came first."""
        return next(iter(self._rings))

    @property
    def name(self) -> str:
        return f"stages {self.first} … {self.last}"

    def kind(self, x: Any) -> Kind:
        """Of an input. Raises `Unfit` where it is no tensor of floating point."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise Unfit(f"they are given {what}, and not one tensor of floating point")
        return tuple(x.shape), x.dtype, self.stages[0].module.training

    def rings(self, kind: Kind) -> Rings:
        """Those of a kind of micro-batch; the graphs are made for it when it first comes.

        Raises `Unfit` where the stages cannot run as one.
        """
        if kind not in self._rings:
            shape, dtype, _ = kind
            device = self.weights[0].device
            x = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
            self.learn(x, kind)
        return self._rings[kind]

    # -- F and B -------------------------------------------------------------------------------------------------

    def forward(self, ops: Ops, link: Link) -> None:
        """F of each (stage, micro-batch): no two of one stage, none feeds another."""
        if ops[0][0] == self.first:
            x = link.recv("F", *ops[0])
            kind = self.kind(x)
            self._kinds[ops[0][1]] = kind
            rings = self.rings(kind)
            rings.inputs[ops[0][1] % rings.length, 0].copy_(x)
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            if max([len(self.stages[r].flights) for r, _ in some]) + 1 > rings.length:
                self._more(rings)
            with torch.no_grad():
                (x,) = rings.read([rings.inputs], some, 1)
                y, *saved = rings.graphs.forward(*self.weights, x.view(self.rows, *kind[0]))
                rings.leave(saved, some)
                self._hand(rings, rings.inputs, y, some, 1)
                if some[-1][0] == self.rows - 1:
                    link.send("F", self.last + 1, some[-1][1], y[-1].clone())
            for r, i in some:
                stage = self.stages[r]
                stage.flights[i] = flight = Flight((), None, None, stage.version, False)
                flight.row = rings.places[r]
                if len(stage.flights) > stage.peak_flights:
                    stage.peak_flights = len(stage.flights)

    def backward(self, ops: Ops, link: Link) -> None:
        """B of each (stage, micro-batch), whose flights are rows of this stack."""
        if ops[-1][0] == self.last:
            gradient, i = link.recv("B", *ops[-1]), ops[-1][1]
            if gradient is None:
                raise Unfit(f"{self.name}: no gradient comes back for micro-batch {i}")
            rings = self._rings[self._kinds[i]]
            rings.gradients[(i - self.rows + 1) % rings.length, -1].copy_(gradient)
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            with torch.no_grad():
                made = rings.graphs.made(*self.weights) if rings.made is None else rings.made
                saved, g = rings.back(some)
                *grads, gx = rings.graphs.backward(*saved, *made, g)
                self._hand(rings, rings.gradients, gx, some, -1)
                r, i = some[0]
                if r == 0:
                    if self.first:
                        link.send("B", self.first - 1, i, gx[0].clone())
                    del self._kinds[i]
                self._add([grads[n] for n in self.trained], some)

    def _groups(self, ops: Ops) -> dict[Kind, Rows]:
        """(row, micro-batch) of the operations, by the kind of the micro-batch."""
        first, kinds = self.first, self._kinds
        if len(self._rings) == 1:  # as it mostly is
            return {kinds[ops[0][1]]: [(s - first, i) for s, i in ops]}
        found: dict[Kind, Rows] = {}
        for s, i in ops:
            found.setdefault(kinds[i], []).append((s - first, i))
        return found

    def _hand(self, rings: Rings, to: Tensor, values: Tensor, some: Rows, by: int) -> None:
        """Give every row's value to the row `by` further, but the one that leaves the stack."""
        edge = self.rows - 1 if by > 0 else 0
        if len(some) == self.rows and some[0][1] - some[-1][1] == by * (self.rows - 1):
            slot = (some[0][1] + by * some[0][0] + 1) % rings.length
            if by > 0:
                to[slot, 1:].copy_(values[:-1])
            else:
                to[slot, :-1].copy_(values[1:])
            return
        moved = [(r + by, i) for r, i in some if r != edge]
        if moved:
            rings.write([to], [values.roll(by, 0)], moved, by)

    def _add(self, grads: list[Tensor], some: Rows) -> None:
        """Add the gradients of the weights to the stages' sums, in micro-batch order."""
        fresh = True
        for r, i in some:
            stage = self.stages[r]
            stage.options = stage.flights.pop(i).options
            fresh = fresh and not stage.count
        whole = len(some) == self.rows
        if whole and fresh:
            self.sums = grads
        elif whole and self.sums is not None:
            torch._foreach_add_(self.sums, grads)
        else:
            self.spread()
            each = [g.unbind() for g in grads]
            for r, _ in some:
                stage = self.stages[r]
                for p, rows in zip(stage.params, each, strict=True):
                    p.grad = rows[r] if not stage.count or p.grad is None else p.grad + rows[r]
        for r, _ in some:
            self.stages[r].count += 1

    def spread(self) -> None:
        """Have every stage its own sums."""
        sums, self.sums = self.sums, None
        for n, whole in enumerate(sums or ()):
            for stage, row in zip(self.stages, whole.unbind(), strict=True):
                stage.params[n].grad = row

    # -- U of plain momentum SGD -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """U of all stages at once, where that is one and the same step of SGD for each. False: nothing was done.

        It has the bits of a step of each.
        """
        sums, group = self.sums, self._group()
        if sums is None or group is None:
            return False
        count = self.stages[0].count
        if any(stage.count != count for stage in self.stages):
            return False
        weights = [self.weights[n] for n in self.trained]
        rate, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        with torch.no_grad():
            grads = sums if count == 1 else torch._foreach_div(sums, float(count))
            if group["maximize"]:
                grads = torch._foreach_neg(grads)
            if decay:
                grads = torch._foreach_add(grads, weights, alpha=decay)
            if momentum:
                velocities = self._followed()
                torch._foreach_mul_(velocities, momentum)
                torch._foreach_add_(velocities, grads)
                grads = velocities
            torch._foreach_add_(weights, grads, alpha=-rate)
        self.sums = None
        for stage in self.stages:
            stage.count = 0.0
        return True

    def _group(self) -> dict[str, Any] | None:
        """The options of every weight, if they are those of plain SGD and the same for all."""
        options = self.stages[0].options
        if any(stage.options is not options for stage in self.stages):
            return None
        if options is not self._options:
            self._options, self._same = options, None
            groups = [group for stage in self.stages for group in options.groups[stage.index]]
            first = {k: v for k, v in groups[0].items() if k != "params"}
            plain = all(type(stage.optimizer) is torch.optim.SGD for stage in self.stages) and plain_sgd(first)
            if plain and all({k: v for k, v in group.items() if k != "params"} == first for group in groups):
                self._same = first
        if self._same is None or any(hooked(stage.optimizer) for stage in self.stages):
            return None
        return self._same

    def _followed(self) -> list[Tensor]:
        """The momentum buffers of all stages, as rows; whatever an optimizer has now, it has from now on as such."""
        if any(
            stage.optimizer.state.get(stage.weights[0], {}).get("momentum_buffer") is not row
            for stage, row in zip(self.stages, self._first_rows, strict=True)
        ):
            self._velocities = [torch.zeros_like(self.weights[n]) for n in self.trained]
            for m, whole in enumerate(self._velocities):
                rows = whole.unbind()
                for stage, row in zip(self.stages, rows, strict=True):
                    entry = stage.optimizer.state.get(stage.weights[m], {})
                    if entry.get("momentum_buffer") is not None:
                        row.copy_(entry["momentum_buffer"])
                    stage.optimizer.state[stage.weights[m]] = {**entry, "momentum_buffer": row}
                self._first_rows = rows if not m else self._first_rows
        return self._velocities

    def _more(self, rings: Rings) -> None:
        """Longer rings."""
        flying = [
            [i for i, f in s.flights.items() if f.row is not None and f.row.kind == rings.kind] for s in self.stages
        ]
        waiting = [[i for i, kind in self._kinds.items() if kind == rings.kind] for _ in self.stages]
        rings.longer(2 * rings.length, flying, waiting)

    # -- the graphs of a kind of micro-batch -----------------------------------------------------------------------

    def learn(self, x: Tensor, kind: Kind) -> None:
        """Capture for micro-batches like x, and prove it: a row does what its stage does, and knows no other row."""
        first = self.stages[0].module
        names = [name for name, _ in first.named_parameters()]
        pairs = zip(names, self.weights, first.parameters(), strict=True)
        weights = {name: w.requires_grad_(p.requires_grad) for name, w, p in pairs}
        xs = x.unsqueeze(0).repeat(self.rows, *(1 for _ in x.shape))
        try:
            self._check_plain(first, x)
            graphs = capture(first, weights, xs)
        finally:
            for w in self.weights:
                w.requires_grad_(False)
        with torch.no_grad():
            y, *saved = graphs.forward(*self.weights, xs)
            rings = Rings(graphs, kind, saved, self._folds(graphs, xs, saved), self.rows, self._length)
            rings.places = [Row(self, kind, r) for r in range(self.rows)]
            made = graphs.made(*self.weights)
            own = {w.untyped_storage().data_ptr() for w in self.weights}
            if all(t.untyped_storage().data_ptr() in own for t in made):
                rings.made = made  # they follow what is written into the weights
            self._prove(rings, xs, y)
        if self._compile is not None:
            made_by = graphs.made
            rings.graphs = Graphs(self._compile(graphs.forward), self._compile(graphs.backward), made_by)
        self._rings[kind] = rings
        for stage in self.stages:
            stage.activation_bytes = sum(t[0, 0].nbytes for t in (*rings.saved, rings.inputs, rings.gradients))

    def gain(self, kind: Kind, repeats: int = 5) -> float:
        """How many times as fast all rows are at once, as one after the other: F and B, measured by turns."""
        rings, times = self._rings[kind], ([], [])  # type: ignore[var-annotated]
        waiting = [ring.clone() for ring in rings.saved]
        xs = torch.randn(rings.inputs[0].shape, device=rings.inputs.device, dtype=torch.float64).to(kind[1])
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            for r, stage in enumerate(self.stages):
                with torch.enable_grad(), untouched(stage.module):
                    x = xs[r].clone().requires_grad_()
                    torch.autograd.grad(stage.module(x), [x, *stage.params], xs[r], allow_unused=True)
            _synchronized(xs.device)
            between = time.perf_counter()
            with torch.no_grad():
                _, *saved = rings.graphs.forward(*self.weights, xs)
                some = [(r, r) for r in range(self.rows)]
                rings.leave(saved, some)
                made = rings.graphs.made(*self.weights) if rings.made is None else rings.made
                back, _ = rings.back(some)
                rings.graphs.backward(*back, *made, xs)
            _synchronized(xs.device)
            times[0].append(between - begin)
            times[1].append(time.perf_counter() - between)
        for ring, value in zip(rings.saved, waiting, strict=True):
            ring.copy_(value)
        return statistics.median(times[0][1:]) / statistics.median(times[1][1:])

    def _check_plain(self, module: nn.Module, x: Tensor) -> None:
        """Raise where a forward does more than compute, which is the stage's own affair."""
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(m, name) for stage in self.stages for m in stage.module.modules() for name in hooks):
            raise Unfit("there are hooks on their modules")
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]
        seen = [b._version for b in module.buffers()]
        with untouched(module), torch.random.fork_rng([x.device] if x.is_cuda else []), torch.no_grad():
            module(x.clone())
            changed = seen != [b._version for b in module.buffers()]
            now = [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]
        if changed:
            raise Unfit("their forward changes a buffer, as batch normalisation does")
        if not all(torch.equal(a, b) for a, b in zip(states, now, strict=True)):
            raise Unfit("their forward draws random numbers")

    def _prove(self, rings: Rings, xs: Tensor, y: Tensor) -> None:
        shape = xs.shape
        g = torch.randn(shape, device=xs.device, dtype=torch.float64, generator=_seeded(xs.device)).to(xs.dtype)
        _, *saved = rings.graphs.forward(*self.weights, xs)
        made = rings.graphs.made(*self.weights)
        some = [(r, r) for r in range(self.rows)]
        rings.leave(saved, some)
        rings.gradients[0].copy_(g)
        *grads, gx = rings.graphs.backward(*rings.back(some)[0], *made, g)
        for r, stage in enumerate(self.stages):
            with torch.enable_grad(), untouched(stage.module):
                x = xs[r].clone().requires_grad_()
                out = stage.module(x)
                wanted = torch.autograd.grad(out, [x, *stage.params], g[r], allow_unused=True)
            found = [gx[r], *(grads[n][r] for n in self.trained)]
            for a, b in zip([y[r], *found], [out, *wanted], strict=True):
                if b is None or not _close(a, b):
                    raise Unfit(f"{stage.label} computes something else than {self.stages[0].label}")

    def _folds(self, graphs: Graphs, xs: Tensor, saved: Sequence[Tensor]) -> list[int]:
        """The dimension of every saved tensor that the rows lie along: one changes where the input of that row does."""
        possible = [[dim for dim in range(t.dim()) if t.shape[dim] % self.rows == 0] for t in saved]
        for r in range(self.rows):
            other = xs.clone()
            other[r] += 1
            _, *after = graphs.forward(*self.weights, other)
            for dims, a, b in zip(possible, saved, after, strict=True):
                changed = (a != b) & ~((a != a) & (b != b))
                for dim in list(dims):
                    elsewhere = _unfolded(changed, dim, self.rows).clone()
                    elsewhere[r] = False
                    if elsewhere.any():
                        dims.remove(dim)
        for dims, t in zip(possible, saved, strict=True):
            if not dims:
                raise Unfit(f"torch keeps something of shape {tuple(t.shape)}, which does not fall into rows")
        return [dims[0] for dims in possible]

    # -- what waits, for states, and what began elsewhere ------------------------------------------------------------

    def restore(self, stage: Stage, mb: int, kind: Kind, tensors: Sequence[Tensor]) -> Row:
        """Put back what `Row.tensors` gave."""
        row, rings = stage.index - self.first, self.rings(kind)
        while len(stage.flights) + 1 > rings.length:
            self._more(rings)
        for ring, value in zip(rings.saved, tensors, strict=True):
            ring[(mb - row) % rings.length, row].copy_(value)
        self._kinds[mb] = kind
        return rings.places[row]

    def waiting(self, name: Name) -> Tensor | None:
        """A copy of a message to one of the stages from another one of them."""
        place = self._place(name)
        return None if place is None else place.clone()

    def take(self, box: dict[Name, Message]) -> None:
        """Messages to one of the stages that should have come from another one of them."""
        for name in [name for name in box if self.within(name)]:
            kind = self._kinds.setdefault(name[2], self.kind(box[name]))
            self.rings(kind)
            place = self._place(name)
            assert place is not None
            place.copy_(box.pop(name))

    def within(self, name: Name) -> bool:
        kind, s, _ = name
        return self.first < s <= self.last if kind == "F" else kind == "B" and self.first <= s < self.last

    def forget(self, mb: int) -> None:
        """B of the first stage was done elsewhere."""
        self._kinds.pop(mb, None)

    def _place(self, name: Name) -> Tensor | None:
        which, s, i = name
        if not self.within(name) or i not in self._kinds:
            return None
        rings, row = self._rings[self._kinds[i]], s - self.first
        if which == "F":
            return rings.inputs[(i + row) % rings.length, row]
        return rings.gradients[(i - row) % rings.length, row]


def _unfolded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """As a matrix with a row of each."""
    return tensor.unflatten(dim, (rows, -1)).movedim(dim, 0).reshape(rows, -1)


def _folded(matrix: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The inverse."""
    rows = len(matrix)
    inner = [*shape[:dim], shape[dim] // rows, *shape[dim + 1 :]]
    return matrix.view(rows, *inner).movedim(0, dim).reshape(shape)


def _synchronized(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _close(a: Tensor, b: Tensor) -> bool:
    far = torch.linalg.vector_norm((a - b).double())
    return bool(far <= CLOSE.get(a.dtype, ROUGH) * torch.linalg.vector_norm(b.double()) + 1e-12)
