"""Dry run: what streaming would move, hold and wait for, counted without moving anything.

The loop, the order and the decisions of `streaming.fetch_policy` are the real ones. Only the worker is not: a
`DryWorker` has three clocks where `StreamedWeights` has three threads. W is a fetch of a stage's weights, F a forward,
B a backward and U an update:

    fetching        W1 ──── W2 ──── W3 ────             a stage's fetch waits for its update
    computing       F0 │ F1 │ F2 │ B2 │ B1 │ B0         an operation waits for the weights that it needs
    updating                          U2 ── U1 ── U0

Bytes are exact as long as every weight gets a gradient; seconds are as good as the costs that are given. No tensor is
touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pipeback.schedules.ops import Kind
from pipeback.schedules.order import Ops, Wave
from pipeback.streaming.fetch_policy import Brings, Choice, FetchPolicy, brings, units_ahead

Choose = Callable[[str, int, int, int, int, int, int], Choice]  # (kind, stage, mb, version, start, base, entry)


class Load(NamedTuple):
    """The bytes of a stage, and the seconds of its operations."""

    weights: int = 0  # of its place on the device
    gradients: int = 0
    activations: int = 0  # of one micro-batch, on the device
    repeat: int = 0  # of activations that the backward computes once more, until it is done
    sent: int | None = None  # of the weights that travel in one copy; None: all
    placed: int | None = None  # of the weights that travel one by one
    left: int | None = None  # of the gradients that leave the device; None: all
    forward: float = 0.0
    backward: float = 0.0
    add: float = 0.0  # to add gradients to those of the micro-batches before
    away: float = 0.0  # for activations to leave the device, while F runs
    back: float = 0.0  # and to come back, while B runs
    fetch: float = 0.0  # to bring its weights
    ask: float = 0.0  # to open it in the store, for a method that shifts its weights
    leave: float = 0.0  # to take its gradients away
    update: float = 0.0


class Room(NamedTuple):
    """Bytes on the device, by kind."""

    weights: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass
class Count:
    """The bytes that were moved, and the time that has passed."""

    weights_in: int = 0
    fetches: int = 0
    gradients_out: int = 0
    sums_in: int = 0
    updates: list[int] = field(default_factory=list)  # by stage
    spills: list[int] = field(default_factory=list)  # by stage: how often sums of gradients went to the store
    stall: float = 0.0
    seconds: float = 0.0

    def since(self, before: Count) -> Count:
        """Return the difference from `before`."""
        values: dict[str, Any] = {}
        for one in fields(self):
            now, then = getattr(self, one.name), getattr(before, one.name)
            values[one.name] = [a - b for a, b in zip(now, then, strict=True)] if isinstance(now, list) else now - then
        return Count(**values)

    def copy(self) -> Count:
        return Count(**{one.name: _copied(getattr(self, one.name)) for one in fields(self)})


class _Flight(NamedTuple):
    version: int
    owned: bool  # whether its weights are shifted, and so no version of the stage
    entry: int


class _Fetch(NamedTuple):
    ready: float
    of: dict[int, tuple[int, bool]]  # of each stage, as in a flight: the version, and whether shifted weights are kept


class _Place:
    """A stage: `version` and `count` are those of the real one."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.leaving = load.gradients if load.left is None else load.left
        self.version = self.count = 0
        self.spilled = False
        self.flights: dict[int, _Flight] = {}
        self.peak_flights = 0
        self.content: int | None = None


class DryWorker:
    """The worker of `stages`, which streams them with `prefetch`; None: all weights stay on the device.

    choose: returns the weights that the method chooses for an operation. hooks: whether the method is asked before F
    and B. A `Loop` calls `run`, `placed`, `look`, `settle`, `land`, `outside`, `compare` and `residence`.
    """

    samples = joins = False
    outside = ()  # there is no state that anybody could change
    executor = None  # operations take time, but nothing is computed
    placed_by, in_flushes, judges = None, False, False
    early: tuple[int, int] | None = None  # the forward that was done before its turn

    def __init__(
        self,
        loads: Mapping[int, Load],
        count: int,
        prefetch: int | None,
        choose: Choose = lambda *_: "newest",
        hooks: Mapping[Kind, bool] | None = None,
        needs_entry: bool = False,
        stacks: Sequence[Sequence[int]] = (),
    ) -> None:
        """stacks: the stages that run as one, which come to the device and leave it together."""
        self.stages = {s: _Place(load) for s, load in loads.items()}
        self.count, self.choose, self.needs_entry = count, choose, needs_entry
        self.resident = prefetch is None
        self.split = "with W" if self.resident else None  # a stage in a store does its backward at once
        self.prefetch = len(loads) if prefetch is None else prefetch
        self._unit_of = {s: s for s in loads} | {s: stack[0] for stack in stacks for s in stack}
        self._units = {unit: [s for s in loads if self._unit_of[s] == unit] for unit in self._unit_of.values()}
        self._ticks = bool(stacks)
        ahead = units_ahead(self.prefetch, map(len, stacks))
        self._policy = FetchPolicy[_Fetch](self, ahead, hooks or {"F": False, "B": False}, needs_entry)
        self.link, self.residence = _Nowhere(), self
        self.options: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        self.entries: dict[int, int] = {}
        self.entered = self.start = self.base = 0
        self.number = Count(updates=[0] * count, spills=[0] * count)
        self.now = 0.0
        self.here = Room()  # what is on the device now
        self.most = Room()  # what was there when it was fullest
        self.peak_weights = 0
        self.host_gradients = self._spilled = 0  # in host memory, at most and for now
        self.last = max(self.stages)
        self._updates: dict[int, float] = {}  # when the last of each stage is done
        self._queued = deque[int](maxlen=self.prefetch + 1)  # gradients of updates that may be under way
        self._fetching = self._updating = 0.0  # when each lane is free
        if self.resident:
            for s in self.stages:
                self.admit(s)

    # -- what a loop asks for ------------------------------------------------------------------------------------

    def placed(self, s: int, value: Any) -> Any:
        return value

    def run(self, waves: Iterable[Wave]) -> None:
        """Count this worker's part of every wave."""
        begin = self.now
        for kind, ops in waves if self.resident else self._policy.ahead(waves, ticks=self._ticks):
            for s, i in ops:
                if self.needs_entry and s == 0:
                    if kind == "U":
                        self.entered += 1
                    elif kind == "F":
                        self.entries[i] = self.entered
            mine = [(s, i) for s, i in ops if s in self.stages]
            if not mine or kind == "I":  # its graph, and so what it holds, goes with W
                continue
            if kind == "U":
                self._update(mine)
            else:
                brought = self._bring(Wave("F" if kind == "F" else "B", mine))
                for s, i in mine:
                    (self._forward if kind == "F" else self._backward)(s, i, brought)
        self.number.seconds += self.now - begin

    @property
    def peak_stages(self) -> int:
        """The most stages that were on the device at once."""
        return len(self.stages) if self.resident else self._policy.peak_stages

    def look(self) -> None:
        """Do nothing: nobody changes anything."""

    def settle(self) -> None:
        """Do nothing: there are no replicas to wait for."""

    def land(self) -> None:
        """Do nothing: every operation is counted where it is done."""

    def compare(self, given: int) -> None:
        """Do nothing: there are no replicas that were given others."""

    def rest(self) -> None:
        """Finish all updates and put all weights into the store, as when the pipeline quiesces."""
        begin = self.now
        self._wait(max([self.now, *self._updates.values()]))
        self._updates.clear()
        self._policy.vacate()
        self.number.seconds += self.now - begin

    # -- operations ----------------------------------------------------------------------------------------------

    def _forward(self, s: int, i: int, brought: _Fetch) -> None:
        place = self.stages[s]
        entry = self.entries[i] if self.needs_entry else 0
        if s == self.last:
            self.entries.pop(i, None)
            self.options.pop(i, None)
        place.flights[i] = _Flight(*brought.of.get(s, (place.version, False)), entry)
        place.peak_flights = max(place.peak_flights, len(place.flights))
        self._hold(activations=place.load.activations)
        self._while(place.load.forward, place.load.away)

    def _backward(self, s: int, i: int, brought: _Fetch) -> None:
        place = self.stages[s]
        if place.spilled:
            self._return(place)
            self.number.sums_in += place.leaving
            self._hold(gradients=place.load.gradients)
        elif not place.count:
            self._hold(gradients=place.load.gradients)
        self._hold(activations=place.load.repeat)
        if place.count:
            self.now += place.load.add
        del place.flights[i]
        place.count += 1
        self._hold(activations=-place.load.activations - place.load.repeat)
        self._while(place.load.backward, place.load.back)

    def _update(self, ops: Ops) -> None:
        places = [self.stages[s] for s, _ in ops]
        for (s, _), place in zip(ops, places, strict=True):
            if place.spilled:
                self._return(place)
            elif place.count:
                self._hold(gradients=-place.load.gradients)
            self.number.updates[s] += 1
            place.count, place.version = 0, place.version + 1
        updating = sum(place.load.update for place in places)
        if self.resident:
            self.now += updating
            return
        leaving = sum(place.leaving for place in places)
        self.number.gradients_out += leaving
        while len(under_way := sorted({end for end in self._updates.values() if end > self.now})) > self.prefetch:
            self._wait(under_way[0])
        self._updating = max(self._updating, self.now + sum(place.load.leave for place in places)) + updating
        self._updates.update((s, self._updating) for s, _ in ops)
        self._queued.append(leaving)
        self._keep(0)

    def _bring(self, wave: Wave) -> _Fetch:
        unit = self._unit_of[wave.ops[0][0]]
        if self.resident or not self.comes(unit):
            return _Fetch(self.now, {})
        fetch = self._policy.use(unit, wave)
        self._wait(fetch.ready)
        return fetch

    # -- what the policy decides ---------------------------------------------------------------------------------

    def unit(self, stage: int) -> int:
        return self._unit_of.get(stage, -1)

    def size(self, unit: int) -> int:
        return len(self._units[unit])

    def comes(self, unit: int) -> bool:
        return unit in self._units and self.stages[unit].load.weights > 0

    def lies(self, unit: int) -> bool:
        return all(self.stages[s].content == self.stages[s].version for s in self._units[unit])

    def found(self, unit: int) -> _Fetch:
        return _Fetch(self.now, {s: (self.stages[s].version, False) for s in self._units[unit]})

    def fetch(self, unit: int, wave: Wave, asks: bool) -> _Fetch:
        """Do the work of the fetching thread."""
        some: list[tuple[int, int | None]] = [*wave.ops] if asks else [(s, None) for s in self._units[unit]]
        begin = max(self._fetching, self.now, *(self._updates.get(s, 0.0) for s in self._units[unit]))
        found = {}
        for s, mb in some:
            place = self.stages[s]
            load, what = place.load, brings("newest", place.version)
            if mb is not None and load.gradients:
                begin += load.ask
                what = self._chosen(wave.kind, s, mb)
            if what.lies is None or place.content != what.lies:
                sent = load.sent if what.lies == place.version else load.placed
                self.number.weights_in += load.weights if sent is None else sent
                self.number.fetches += 1
                begin += load.fetch
                place.content = what.lies
            found[s] = what.version, what.lies is None and wave.kind == "F"
        self._fetching = begin
        return _Fetch(begin, found)

    def _chosen(self, kind: Kind, s: int, mb: int) -> Brings:
        place = self.stages[s]
        flight = place.flights.get(mb)
        entry = self.entries.get(mb, 0) if kind == "F" else 0 if flight is None else flight.entry
        choice = self.choose(kind, s, mb, place.version, self.start, self.base, entry)
        if flight is None:
            return brings(choice, place.version)
        return brings(choice, place.version, flight.version, owned=flight.owned)

    def end(self, fetch: _Fetch) -> None:
        self.now = max(self.now, fetch.ready)

    def admit(self, unit: int) -> None:
        for s in self._units[unit]:
            self._hold(weights=self.stages[s].load.weights)
        self.peak_weights = max(self.peak_weights, self.here.weights)

    def dismiss(self, unit: int) -> None:
        for s in self._units[unit]:
            place = self.stages[s]
            if place.count and not place.spilled and place.load.gradients:
                place.spilled = True
                self.number.gradients_out += place.leaving
                self.number.spills[s] += 1
                self._hold(gradients=-place.load.gradients)
                self._keep(place.leaving)
                self.now += place.load.leave
            place.content = None
            self._hold(weights=-place.load.weights)

    # -- counting ------------------------------------------------------------------------------------------------

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.number.stall += until - self.now
            self.now = until

    def _while(self, computing: float, moving: float) -> None:
        self.now += computing
        self._wait(self.now + moving - computing)

    def _hold(self, weights: int = 0, gradients: int = 0, activations: int = 0) -> None:
        w, g, a = self.here
        self.here = Room(w + weights, g + gradients, a + activations)
        if self.here.total > self.most.total:
            self.most = self.here

    def _return(self, place: _Place) -> None:
        place.spilled = False
        self._keep(-place.leaving)

    def _keep(self, size: int) -> None:
        """Count gradients in host memory: sums that left with their stage, and those of updates that are not done."""
        self._spilled += size
        self.host_gradients = max(self.host_gradients, self._spilled + sum(self._queued))


class _Nowhere:
    """A link that drops every message."""

    def enter(self, *message: Any) -> None: ...

    def send(self, *message: Any) -> None: ...


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
