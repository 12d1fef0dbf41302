"""Stack: runs stages as one that are alike. At a tick, their forwards (F) or backwards (B) are one call, each stage on
its own micro-batch.

A stack consists of neighbours, or of every second stage where even and odd stages take turns; two such stacks pass
their outputs to each other. The weights are rows of tensors (n, …), so that methods and optimizers see what they always
see (`rows`), while F and B are each one graph over all rows (`capture`). Tensors that wait between F and B lie in ring
buffers. Rows that are idle at a tick are computed as well, and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.runtime.link import Link, Name
from pipeback.schedules.order import Ops
from pipeback.stages.compiled import Options, of_ticks, writes_in_order
from pipeback.stages.flight import Flight
from pipeback.stages.stage import Stage
from pipeback.tensors.layout import Message
from pipeback.vectorized.bounded_cache import BoundedCache
from pipeback.vectorized.capture import Unfit
from pipeback.vectorized.graph_rewrites import Graphs
from pipeback.vectorized.ring_buffers import Kind, RingBuffers, Turns
from pipeback.vectorized.rows import Rows
from pipeback.vectorized.verify import example, gain, verified
from pipeback.vectorized.weight_ring import WeightRing

Compile = Callable[[Any], Any]
# forms of micro-batches that have memory at once, more only while more are in flight. At a change of form two are in
# flight; where runs of three forms take turns, memory is soon allocated again
KINDS = 2
LARGE = 1 << 20  # bytes of weights above which no cache holds a gradient until the step, and a compiler gains nothing


class FlightRow(NamedTuple):
    """The tensors that the forward of a stacked stage has saved for its backward, as a row of the stack."""

    stack: Stack
    kind: Kind
    number: int

    def tensors(self, mb: int) -> list[Tensor]:
        """Return copies of the saved tensors of a micro-batch, in the order of the graph."""
        rings, at = self.stack.rings(self.kind), mb - self.number
        return [part[at % len(part), self.number].clone() for part in rings.parts]


class Stack:
    """A stack of `stages`, upstream first: neighbours, or every second stage, with the others in the stack `partner`.

    length: slots of the ring buffers at first, at least the micro-batches in flight at a stage. options: those of
    torch.compile; None: it is not used.
    """

    def __init__(self, stages: Sequence[Stage], length: int, options: Options | None = None) -> None:
        self.stages = list(stages)
        self.first, self.last = stages[0].index, stages[-1].index
        self.numbers = [stage.index for stage in stages]
        self.partner: Stack | None = None
        self.stash: WeightRing | None = None  # allocated when a tick first needs it
        self.spare: list[Tensor] = []  # memory for the weights, allocated likewise
        self.calls = [stage.call for stage in stages]  # the calls of the stages one by one
        self._row_of = {s: r for r, s in enumerate(self.numbers)}
        self.rows = Rows(stages)
        self._length = length
        self._kinds: dict[int, Kind] = {}  # of the micro-batches between F and B of the first stage
        self.apart: set[int] = set()  # those among them that run stage by stage
        self._rings: BoundedCache[Kind, RingBuffers] = BoundedCache()
        self._newest: Kind | None = None
        self._era = 0  # how often the computation of the modules has changed
        self._unfit: dict[Kind, str] = {}  # why the stages cannot run as one, by kind
        self.told: dict[str, str] = {}  # what the user is told about stacks, by their names
        self.compile: Compile | None = None  # compiles both graphs
        self.fuse: Compile | None = None  # compiles whole ticks
        if options is not None:
            self.compile = lambda graph: torch.compile(graph, **options)
            if writes_in_order(options):
                self.fuse = lambda tick: torch.compile(tick, **of_ticks(options))
        self.leaps = False  # whether most ticks skip `forward` and `backward`, which then need no compiler

    @property
    def one_kind(self) -> Kind | None:
        """The kind of all micro-batches in flight; None if there are several."""
        kinds = set(self._kinds.values())
        return kinds.pop() if len(kinds) == 1 else None

    def moved_on(self, ticks: int, f: int, b: int, options: Mapping[int, Any]) -> None:
        """Note that `ticks` ticks were done; at the first of them row r did F of f − r and B of b + r.

        options: those of the micro-batches whose F was done. Finished flights are reused for as many new ones.
        """
        kind = self.one_kind
        assert kind is not None
        for r, stage in enumerate(self.stages):
            flights, count = stage.flights, f - b - 2 * r
            gone, came = min(count, ticks), max(f - r, b + r + ticks)
            version = stage.version - (f - r)  # of micro-batch i: version + i
            for i, flight in enumerate([flights.pop(i) for i in range(b + r, b + r + gone)], came):
                flight.version, flight.options = version + i, options[i]
                flights[i] = flight
            stage.went_backward(options[b + r + ticks - 1])
            stage.note_flights(count + 1)
        for i in range(b, min(f, b + ticks)):
            del self._kinds[i]
        for i in range(max(f, b + ticks), f + ticks):
            self._kinds[i] = kind

    @property
    def held(self) -> int:
        """Bytes per stage of the ring buffers for micro-batches in flight, whether they are full or not."""
        return sum(self._rings[kind].nbytes for kind in self._busy) // len(self.stages)

    @property
    def beside(self) -> int:
        """Bytes of all stages other than weights and ring buffers in use: for forms of micro-batches that may return,
        stashed versions, and copies of the weights for the step.
        """
        versions = sum((stage.versions.peak - 1) * stage.bytes() for stage in self.stages)
        stash = 0 if self.stash is None else max(0, self.stash.nbytes - int(versions))
        idle = sum(self._rings[kind].nbytes for kind in self._rings.idle(self._busy))
        return idle + stash + sum(w.nbytes for w in self.spare)

    @property
    def _busy(self) -> set[Kind]:
        """The kinds of the micro-batches in flight, and of the last one that came."""
        return {*self._kinds.values(), *([] if self._newest is None else [self._newest])}

    @property
    def proved(self) -> bool:
        """Whether the stages run as one: graphs were made for some kind and passed all checks."""
        return bool(self._rings)

    @property
    def known(self) -> Kind:
        """The kind of the first micro-batch."""
        return next(iter(self._rings))

    @property
    def name(self) -> str:
        second = f"{self.numbers[1]}, " if self.partner is not None and len(self.numbers) > 1 else ""
        return f"stages {self.first}, {second}… {self.last}" if second else f"stages {self.first} … {self.last}"

    def kind(self, x: Any) -> Kind:
        """Return the kind of an input. Raises `Unfit` if it is not one floating-point tensor."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise Unfit(f"they are given {what}, and not one floating-point tensor")
        return tuple(x.shape), x.dtype, self.stages[0].module.training + 2 * self._era

    def renew(self) -> None:
        """Note that the modules compute something else from now on; micro-batches in flight keep the old graphs."""
        self._era += 1

    def rings(self, kind: Kind) -> RingBuffers:
        """Return the ring buffers for a kind of micro-batch; its graphs are made when it first comes.

        Raises `Unfit` where the stages cannot run as one.
        """
        if kind in self._unfit:
            raise Unfit(self._unfit[kind])
        if kind != self._newest:
            self._newest = None
            self._make_room(kind)
        if kind not in self._rings:
            shape, dtype, _ = kind
            device = self.rows.weights[0].device
            try:
                self.learn(example(shape, dtype, device), kind)
            except Exception as error:  # whatever the user's code or torch raises: the stages still run one by one
                told = str(error).strip().partition("\n")[0]
                self._unfit[kind] = told if isinstance(error, Unfit) else f"torch cannot run them as one: {told}"
                self._rings.pop(kind, None)
                if self.name in self.told:
                    self.told[self.name] += f"; micro-batches {tuple(shape)} stage by stage: {self._unfit[kind]}"
                raise Unfit(self._unfit[kind]) from error
        if kind != self._newest:
            self._newest = kind
            self._rings.used(kind, self._busy).hold(True)
        return self._rings[kind]

    def _make_room(self, kind: Kind) -> None:
        """Keep memory for this kind, for those in flight and, if these are few, for the kind before; free all other."""
        busy = {*self._kinds.values(), kind}
        idle = self._rings.idle(busy)
        for old in idle[: max(0, len(busy) + len(idle) - KINDS)]:
            self._rings[old].hold(False)

    # -- which micro-batches run as one ----------------------------------------------------------------------------

    def as_one(self, ops: Ops, box: Mapping[Name, Message]) -> Ops:
        """Return those of these forwards that are done as one, because their kind of micro-batch allows it."""
        for s, i in ops:
            if s == self.first or (i not in self._kinds and i not in self.apart):
                self._enter(i, box["F", s, i])
        return [op for op in ops if op[1] not in self.apart] if self.apart else ops

    def _enter(self, mb: int, x: Message) -> None:
        """Note that a micro-batch enters, with the input x of one of the stages."""
        self.apart.discard(mb)
        try:
            kind = self.kind(x)
            self.rings(kind)
        except Unfit:
            self._kinds.pop(mb, None)
            self.apart.add(mb)
        else:
            self._kinds[mb] = kind

    def restart(self, stage: Stage) -> None:
        """Forget what is in flight when a state is loaded into the first stage; the states of the others follow."""
        if stage is self.stages[0]:
            self._kinds.clear()
            self.apart.clear()

    # -- F and B -------------------------------------------------------------------------------------------------

    def forward(self, ops: Ops, link: Link) -> None:
        """Do F of each (stage, micro-batch); each stage occurs at most once, and none feeds another one."""
        came = {} if self.partner is None else {i: link.recv("F", s, i) for s, i in ops}
        if ops[0][0] == self.first and self.partner is None:
            i = ops[0][1]
            rings = self._rings[self._kinds[i]]
            rings.inputs[i % rings.length, 0].copy_(link.recv("F", *ops[0]))
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            if max([len(self.stages[r].flights) for r, _ in some]) + 1 > rings.length:
                self._more(rings)
            with torch.no_grad():
                x = self._joined(came, some) if came else rings.read([rings.inputs], some, 1)[0]
                y, *saved = self._graphs(rings).forward(*self.rows.weights, x.view(len(self.stages), *kind[0]))
                rings.leave(saved, some)
                if came:
                    for r, i in some:
                        link.send("F", self.numbers[r] + 1, i, y[r])
                else:
                    self._hand(rings, rings.inputs, y, some, 1)
                    if some[-1][0] == len(self.stages) - 1:
                        link.send("F", self.last + 1, some[-1][1], y[-1].clone())
            for r, i in some:
                stage = self.stages[r]
                flight = Flight((), None, None, stage.version, False)
                flight.row = rings.flights[r]
                stage.take_off(i, flight)

    def backward(self, ops: Ops, link: Link) -> None:
        """Do B of each (stage, micro-batch), whose flights are rows of this stack."""
        came = {i: link.recv("B", s, i) for s, i in ops if self.partner is not None or s == self.last}
        for i, gradient in came.items():
            if gradient is None:
                raise Unfit(f"{self.name}: no gradient comes back for micro-batch {i}")
            if self.partner is None:
                rings = self._rings[self._kinds[i]]
                rings.gradients[(i - len(self.stages) + 1) % rings.length, -1].copy_(gradient)
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            with torch.no_grad():
                made = rings.written.made(*self.rows.weights) if rings.made is None else rings.made
                apart, (r, i) = self.partner is not None, some[0]
                g = self._joined(came, some) if apart else rings.read([rings.gradients], some, -1)[0]
                *grads, gx = self._graphs(rings).backward(*rings.back(some), *made, g.view(len(self.stages), *kind[0]))
                if apart:
                    for row, mb in some:
                        if self.numbers[row]:
                            link.send("B", self.numbers[row] - 1, mb, gx[row])
                else:
                    self._hand(rings, rings.gradients, gx, some, -1)
                    if r == 0 and self.first:
                        link.send("B", self.first - 1, i, gx[0].clone())
                if r == 0:
                    del self._kinds[i]
                for r, i in some:
                    stage, flight = self.stages[r], self.stages[r].flights.pop(i)
                    stage.went_backward(flight.options)
                    stage.versions.hand(i, flight)
                self.rows.add([grads[n] for n in self.rows.trained], [r for r, _ in some])

    def _graphs(self, rings: RingBuffers) -> Graphs:
        return rings.eager if self.leaps else rings.graphs

    def _groups(self, ops: Ops) -> dict[Kind, Turns]:
        """Return (row, micro-batch) of the operations, by the kind of the micro-batch."""
        rows, kinds = self._row_of, self._kinds
        if len(self._rings) == 1:  # the common case
            return {kinds[ops[0][1]]: [(rows[s], i) for s, i in ops]}
        found: dict[Kind, Turns] = {}
        for s, i in ops:
            found.setdefault(kinds[i], []).append((rows[s], i))
        return found

    def _joined(self, came: Mapping[int, Tensor], some: Turns) -> Tensor:
        """Join the messages that have come for these rows into one tensor (n, …); its other rows are zeros."""
        values = [came[i] for _, i in some]
        if len(some) == len(self.stages):
            return torch.stack(values)
        whole = values[0].new_zeros(len(self.stages), *values[0].shape)
        for (r, _), value in zip(some, values, strict=True):
            whole[r] = value
        return whole

    def _hand(self, rings: RingBuffers, to: Tensor, values: Tensor, some: Turns, by: int) -> None:
        """Pass every row's value to the row `by` further on, except the one that leaves the stack."""
        edge = len(self.stages) - 1 if by > 0 else 0
        if len(some) == len(self.stages) and some[0][1] - some[-1][1] == by * (len(self.stages) - 1):
            slot = (some[0][1] + by * some[0][0] + 1) % rings.length
            if by > 0:
                to[slot, 1:].copy_(values[:-1])
            else:
                to[slot, :-1].copy_(values[1:])
            return
        moved = [(r + by, i) for r, i in some if r != edge]
        if moved:
            rings.write([to], [values.roll(by, 0)], moved, by)

    def gain(self) -> float:
        """Return the speed-up of F and B of all rows at once over one after the other, timed alternately."""
        return gain(self.stages, self.rows.weights, self._rings[self.known])

    def _more(self, rings: RingBuffers) -> None:
        """Make the rings longer."""
        flying = [
            [i for i, f in s.flights.items() if f.row is not None and f.row.kind == rings.kind] for s in self.stages
        ]
        waiting = [[i for i, kind in self._kinds.items() if kind == rings.kind] for _ in self.stages]
        rings.longer(2 * rings.length, flying, waiting)

    def learn(self, x: Tensor, kind: Kind) -> None:
        """Make and check the graphs for micro-batches like x."""
        rings = self._rings[kind] = verified(
            self.stages, self.rows.weights, self.rows.trained, x, kind, self._length,
            recompute=self.stages[0].keeping is not None,
        )  # fmt: skip
        if self.partner is not None:
            rings.alone()
        if self.fuse is not None:
            large = [n for n in self.rows.trained if self.rows.weights[n].nbytes > LARGE]
            rings = self._rings[kind] = rings.packed(large)
        if self.compile is not None:
            forward, backward, made = rings.graphs
            rings.graphs = Graphs(self.compile(forward), self.compile(backward), made)
        rings.flights = [FlightRow(self, kind, r) for r in range(len(self.stages))]
        waits = [*rings.saved, *([rings.inputs, rings.gradients] if self.partner is None else [])]
        for stage in self.stages:
            stage.learn(activation_bytes=sum(t[0, 0].nbytes for t in waits))

    # -- waiting tensors: for states, and from micro-batches that began elsewhere ------------------------------------

    def restore(self, stage: Stage, mb: int, kind: Kind, tensors: Sequence[Tensor]) -> FlightRow:
        """Put back the tensors that `FlightRow.tensors` gave."""
        row, rings = self._row_of[stage.index], self.rings(kind)
        while len(stage.flights) + 1 > rings.length:
            self._more(rings)
        for part, value in zip(rings.parts, tensors, strict=True):
            part[(mb - row) % rings.length, row].copy_(value)
        self._kinds[mb] = kind
        flight: FlightRow = rings.flights[row]
        return flight

    def waiting(self, name: Name) -> Tensor | None:
        """Return a copy of a message between two of the stages; None if it is not in the rings."""
        place = self._place(name)
        return None if place is None else place.clone()

    def take(self, box: dict[Name, Message]) -> None:
        """Take messages between two of the stages, which came from a state, into the rings."""
        for name in [name for name in box if self.within(name)]:
            if name[2] not in self._kinds and name[2] not in self.apart:
                self._enter(name[2], box[name])
            place = self._place(name)
            if place is not None:  # otherwise it goes through the link
                place.copy_(box.pop(name))

    def within(self, name: Name) -> bool:
        kind, s, _ = name
        if self.partner is not None:
            return False  # between these stages there is only the link
        return self.first < s <= self.last if kind == "F" else kind == "B" and self.first <= s < self.last

    def forget(self, mb: int) -> None:
        """Forget a micro-batch, since B of the first stage was done elsewhere."""
        self._kinds.pop(mb, None)
        self.apart.discard(mb)

    def _place(self, name: Name) -> Tensor | None:
        which, s, i = name
        if not self.within(name) or i not in self._kinds:
            return None
        rings, row = self._rings[self._kinds[i]], s - self.first
        if which == "F":
            return rings.inputs[(i + row) % rings.length, row]
        return rings.gradients[(i - row) % rings.length, row]
