"""Stack: runs stages as one that are alike. At a tick, their forwards (F) or backwards (B) are one call, each stage on
its own micro-batch.

The stages of a stack may stand anywhere in the pipeline, since no operation of a tick feeds another one of it. A stack
may be a single stage: then it is the stage as two graphs, without autograd. The weights are rows of tensors (n, …), so
that methods and optimizers see what they always see (`rows`), while F and B are each one graph over all rows
(`capture`). Tensors that wait between F and B lie in ring buffers. Rows that are idle are computed, too, and dropped,
unless few have something to do (`single_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.counts import numbered
from pipeback.runtime.link import Name, StageLink
from pipeback.schedules.order import Ops
from pipeback.stages.compiled import Compiled, Options
from pipeback.stages.flight import Flight
from pipeback.stages.stage import Stage
from pipeback.stages.tracing_lock import TRACING
from pipeback.tensors.accelerators import under
from pipeback.tensors.layout import Message
from pipeback.vectorized.buffers.version_ring import VersionRing
from pipeback.vectorized.buffers.waiting import Turns, Waiting
from pipeback.vectorized.buffers.weight_ring import WeightRing
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.making.eras import Eras
from pipeback.vectorized.making.graph_maker import GraphMaker
from pipeback.vectorized.stacks.flight_row import FlightRow
from pipeback.vectorized.stacks.single_rows import SingleRows
from pipeback.vectorized.steps.row_sums import RowSums
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_plan import StepPlan
from pipeback.vectorized.tracing.capture import Unfit
from pipeback.vectorized.tracing.forms import Kind, leaves, packed
from pipeback.vectorized.tracing.graphs import Graphs

# forms of micro-batches that have memory at once, more only while more are in flight: at a change of form there are two
KINDS = 2


class Stack:
    """A stack of `stages`, upstream first.

    places: of each stage, p (`ring_buffers`). length: slots of the ring buffers at first, at least the micro-batches in
    flight at a stage. options: those of torch.compile; None: it is not used.
    """

    def __init__(
        self, stages: Sequence[Stage], places: Sequence[int], length: int, options: Options | None = None
    ) -> None:
        self.stages, self.places = list(stages), list(places)
        self.first, self.last = stages[0].index, stages[-1].index
        self.numbers = [stage.index for stage in stages]
        self.stash: WeightRing | VersionRing | None = None  # allocated when a tick first needs it
        self.spare: list[Tensor] = []  # memory for the weights, allocated likewise
        self._apart = [stage.call if stage.stack is None else stage.stack.call_of(stage) for stage in stages]
        self._row_of = {s: r for r, s in enumerate(self.numbers)}
        self.rows = Rows(stages)
        self.plan = StepPlan(self.rows)
        self.sums = RowSums(self.rows, self.plan)
        self.maker = GraphMaker(stages, self.rows, places, length, options)
        self.single = SingleRows(self.rows, self.maker, self.places)
        self._crowded = False  # whether more kinds had memory than should
        self._kinds: dict[int, Kind] = {}  # of the micro-batches between F and B of the first stage
        self.apart: set[int] = set()  # those among them that run stage by stage
        self._rings: BoundedCache[Kind, Waiting] = BoundedCache()
        self._newest: Kind | None = None
        self.eras = Eras()
        self._unfit: dict[Kind, str] = {}  # why the stages cannot run as one, by kind
        self.told: dict[str, str] = {}  # what the user is told about stacks, by their names
        self.flushed = 0  # the most bytes that one stage has kept within a flush (`flushes/whole_flush`)
        self.leaps = False  # whether most ticks skip `forward` and `backward`, which then need no compiler

    @property
    def alone(self) -> bool:
        """Whether it is a single stage."""
        return len(self.stages) == 1

    @property
    def flying(self) -> bool:
        """Whether micro-batches are in flight as rows of it."""
        return any(flight.row is not None for stage in self.stages for flight in stage.flights.values())

    def call_of(self, stage: Stage) -> Callable[[Any], Any]:
        """Return the call of one of the stages by itself."""
        call = self._apart[self._row_of[stage.index]]
        return call if isinstance(call, Compiled) else stage.call  # which computes functions of weights anew since then

    @property
    def one_kind(self) -> Kind | None:
        """The kind of all micro-batches in flight; None if there are several."""
        kinds = set(self._kinds.values())
        return kinds.pop() if len(kinds) == 1 else None

    def moved_on(
        self,
        rounds: Sequence[int],
        f: Sequence[int],
        b: Sequence[int],
        options: Mapping[int, Any],
        versions: Mapping[int, Sequence[int]],
    ) -> None:
        """Note that stages have done rounds of F, B and U. rounds: of every stage of the pipeline; f, b: likewise, the
        micro-batches of the first of these F and B. versions: by stage, those on which its F ran.

        options: those of the micro-batches that are in flight now, and of the last one that was not. Finished flights
        are reused for as many new ones.
        """
        for stage in self.stages:
            s, flights = stage.index, stage.flights
            if not rounds[s]:
                continue
            count, done = f[s] - b[s], b[s] + rounds[s]
            gone, came = min(count, rounds[s]), max(f[s], done)
            for i, flight in enumerate([flights.pop(i) for i in range(b[s], b[s] + gone)], came):
                flight.version, flight.options = versions[s][i - f[s]], options[i]
                flights[i] = flight
            stage.went_backward(options[done - 1])
            stage.note_flights(count + 1)
        first = self.first
        if rounds[first]:
            kind, done = self.one_kind, b[first] + rounds[first]
            assert kind is not None
            for i in range(b[first], min(f[first], done)):
                del self._kinds[i]
            for i in range(max(f[first], done), f[first] + rounds[first]):
                self._kinds[i] = kind

    @property
    def held(self) -> int:
        """Bytes per stage of the ring buffers for micro-batches in flight, full or not, and of what flushes keep."""
        return self.flushed + sum(self._rings[kind].nbytes for kind in self._busy) // len(self.stages)

    def spread(self) -> None:
        """Give every stage its own gradient sums."""
        self.sums.spread()

    def note_flush(self, kept: int) -> None:
        """Note that one stage has kept so many bytes within a flush."""
        self.flushed = max(self.flushed, kept)

    @property
    def beside(self) -> int:
        """Bytes of all stages other than weights and ring buffers in use: for forms of micro-batches that may return,
        stashed versions, copies of the weights for the step, and sums of gradients.
        """
        versions = sum((stage.versions.peak - 1) * stage.bytes() for stage in self.stages)
        stash = 0 if self.stash is None else max(0, self.stash.nbytes - int(versions))
        idle = sum(self._rings[kind].nbytes for kind in self._rings.idle(self._busy))
        return idle + stash + sum(w.nbytes for w in (*self.spare, *self.plan.totals))

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
        return numbered("stage", self.numbers)

    def kind(self, x: Any) -> Kind:
        """Return the kind of an input. Raises `Unfit` if it is neither a tensor nor a tuple of tensors."""
        tensors = leaves(x)
        if not all(type(v) is Tensor and v.layout is torch.strided for v in tensors):
            what = next(v for v in tensors if type(v) is not Tensor or v.layout is not torch.strided)
            raise Unfit(f"they are given {type(what).__name__}, and not plain tensors")
        inputs = tuple((tuple(v.shape), v.dtype) for v in tensors)
        return Kind(inputs, type(x) is tuple, self.mode, self.stages[0].learnt.casts)

    @property
    def mode(self) -> int:
        """The mode of the micro-batches that come now (`Kind`)."""
        return self.stages[0].module.training + 2 * self.eras.number

    def renew(self) -> None:
        """Note that the modules compute something else from now on; micro-batches in flight keep the old graphs."""
        self.eras.begin()

    def rings(self, kind: Kind, x: Any = None) -> Waiting:
        """Return the ring buffers for a kind of micro-batch; its graphs are made when it first comes.

        x: an input of this kind; None: numbers are made up. Raises `Unfit` where the stages cannot run as one.
        """
        if kind in self._unfit:
            raise Unfit(self._unfit[kind])
        if kind not in self._rings:
            self.eras.check()
        if kind != self._newest:
            self._newest = None
            self._make_room(kind)
        if kind not in self._rings:
            try:
                with TRACING, under(()), self.eras.making():
                    self._hold(self.maker.learn(kind, x))
            except Exception as error:  # whatever the user's code or torch raises: the stages still run one by one
                told = str(error).strip().partition("\n")[0]
                self._unfit[kind] = told if isinstance(error, Unfit) else f"torch cannot run them as one: {told}"
                self._rings.pop(kind, None)
                if self.name in self.told:
                    shapes = ", ".join(str(shape) for shape, _ in kind.inputs)
                    self.told[self.name] += f"; micro-batches {shapes} stage by stage: {self._unfit[kind]}"
                raise Unfit(self._unfit[kind]) from error
        if kind != self._newest:
            self._newest = kind
            self._rings.used(kind, self._busy).hold(True)
        return self._rings[kind]

    def _hold(self, waiting: Waiting) -> None:
        waiting.flights = [FlightRow(self.rings, self.numbers, waiting.kind, r) for r in range(len(self.stages))]
        self._rings[waiting.kind] = waiting

    def settle(self, last: bool | None) -> None:
        """As `GraphMaker.settle`; no micro-batch may be in flight."""
        waiting = self.maker.settle(last)
        if waiting is not None:
            self._hold(waiting)

    @property
    def sample(self) -> Waiting:
        """The graphs of the first micro-batch."""
        return self._rings[self.known]

    def gain(self) -> float:
        """As `GraphMaker.gain`."""
        return self.maker.gain(self.sample)

    def flush_gain(self, count: int) -> float:
        """As `GraphMaker.flush_gain`."""
        return self.maker.flush_gain(self.known, count)

    def _make_room(self, kind: Kind | None) -> None:
        """Keep memory for this kind, for those in flight and, if these are few, for the kind before; free all other."""
        busy = {*self._kinds.values(), kind}
        idle = self._rings.idle(busy)
        for old in idle[: max(0, len(busy) + len(idle) - KINDS)]:
            self._rings[old].hold(False)
        self._crowded = len(busy) > KINDS

    # -- which micro-batches run as one ----------------------------------------------------------------------------

    def as_one(self, ops: Ops, box: Mapping[Name, Message]) -> Ops:
        """Return those of these forwards that are done as one, because their kind of micro-batch allows it."""
        for s, i in ops:
            if s == self.first or (i not in self._kinds and i not in self.apart):
                self._enter(s, i, box["F", s, i])
        return [op for op in ops if op[1] not in self.apart and self._alike(op, box)]

    def _alike(self, op: tuple[int, int], box: Mapping[Name, Message]) -> bool:
        """Whether a stage is given what the first one is given: in other forms, their inputs may differ."""
        s, i = op
        given = leaves(box["F", s, i])
        return [(v.shape, v.dtype) for v in given] == [*self._kinds[i].inputs]

    def _enter(self, s: int, mb: int, x: Message) -> None:
        """Note that a micro-batch enters, with the input x of stage s, whose weights are there."""
        self.apart.discard(mb)
        try:
            if (kind := self.kind(x)) not in self._rings:
                self.rows.lend(self._row_of[s])
            self.rings(kind, x)
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

    def entered(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of a single stage as its graphs take them."""
        if not self.first:  # tensors of the user's, who may write into them
            xs = [x.clone(memory_format=torch.contiguous_format) for x in xs]
        return self.maker.lying(xs)

    # -- F and B -------------------------------------------------------------------------------------------------

    def forward(self, ops: Ops, link: StageLink) -> None:
        """Do F of each (stage, micro-batch); each stage occurs at most once, and none feeds another one."""
        came = {i: leaves(link.recv("F", s, i)) for s, i in ops}
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            if max([len(self.stages[r].flights) for r, _ in some]) + 1 > rings.length:
                self._more(rings)
            with torch.no_grad():
                if self.single.pay(rings, len(some)):
                    sent = {r: self.single.forward(rings, r, i, came[i]) for r, i in some}
                else:
                    xs = [self._joined([came[i][n] for _, i in some], some) for n in range(len(kind.inputs))]
                    xs = self.entered(xs) if self.alone else xs
                    graphs = self._graphs(rings)
                    found = graphs.forward(*self.rows.weights, *xs)
                    rings.leave(found[graphs.outputs :], some)
                    ys = [self.rows.of(y) for y in found[: graphs.outputs]]
                    sent = {r: [y[r] for y in ys] for r, _ in some}
                for r, i in some:
                    link.send("F", self.numbers[r] + 1, i, packed(sent[r], rings.written.packs))
            for r, i in some:
                stage = self.stages[r]
                flight = Flight((), None, None, stage.version, False)
                flight.row = rings.flights[r]
                stage.take_off(i, flight)

    def backward(self, ops: Ops, link: StageLink) -> None:
        """Do B of each (stage, micro-batch), whose flights are rows of this stack."""
        came = {i: leaves(link.recv("B", s, i)) for s, i in ops}
        for kind, some in self._groups(ops).items():
            rings = self._rings[kind]
            with torch.no_grad():
                if self.single.pay(rings, len(some)):
                    grads, upstream = self.single.back(rings, some, came)
                else:
                    made = rings.written.made(*self.rows.weights) if rings.made is None else rings.made
                    graphs = self._graphs(rings)
                    gs = [self._joined([came[i][n] for _, i in some], some) for n in graphs.gives]
                    gs = self.maker.lying(gs) if self.alone else gs
                    found = graphs.backward(*rings.back(some), *made, *gs)
                    grads, gxs = found[: len(self.rows.weights)], found[len(self.rows.weights) :]
                    back = [None if gx is None else self.rows.of(gx) for gx in gxs]
                    upstream = {r: [None if gx is None else gx[r] for gx in back] for r, _ in some}
                for r, i in some:
                    if self.numbers[r]:
                        link.send("B", self.numbers[r] - 1, i, packed(upstream[r], kind.packed))
                self.sums.add([grads[n] for n in self.rows.trained], [r for r, _ in some])
            for r, i in some:
                if not r:
                    self.forget(i)
                stage, flight = self.stages[r], self.stages[r].flights.pop(i)
                stage.went_backward(flight.options)
                stage.versions.hand(i, flight)

    def _graphs(self, rings: Waiting) -> Graphs:
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

    def _joined(self, values: Sequence[Tensor], some: Turns) -> Tensor:
        """Join the messages that have come for these rows into one tensor (n, …); its other rows are zeros."""
        if self.alone:
            return values[0]
        if len(some) == len(self.stages):
            return torch.stack(list(values)).contiguous()
        whole = values[0].new_zeros(len(self.stages), *values[0].shape)
        for (r, _), value in zip(some, values, strict=True):
            whole[r] = value
        return whole

    def _more(self, rings: Waiting) -> None:
        """Make the rings longer."""
        flying = [
            [i for i, f in s.flights.items() if f.row is not None and f.row.kind == rings.kind] for s in self.stages
        ]
        rings.longer(2 * rings.length, flying)

    # -- states: tensors that wait between F and B -------------------------------------------------------------------

    def restore(self, stage: Stage, mb: int, plain: Sequence[Any], tensors: Sequence[Tensor]) -> FlightRow:
        """Put back the tensors that `FlightRow.tensors` gave. plain: what `FlightRow.written` gave."""
        kind = Kind.read(plain[:-1])
        row, rings = self._row_of[stage.index], self.rings(kind)
        while len(stage.flights) + 1 > rings.length:
            self._more(rings)
        rings.restore(row, mb, tensors)
        self._kinds[mb] = kind
        flight: FlightRow = rings.flights[row]
        return flight

    def forget(self, mb: int) -> None:
        """Forget a micro-batch, since B of the first stage was done."""
        self._kinds.pop(mb, None)
        self.apart.discard(mb)
        if self._crowded:
            self._make_room(self._newest)
