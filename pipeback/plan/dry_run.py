"""Dry run: what streaming would move, hold and wait for, counted without moving anything.

    loop, order     the real ones
    worker          `DryWorker`: takes the decisions of `Streaming`, and has three clocks instead of three threads

    fetching        W1 ──── W2 ──── W3 ────             a stage's fetch waits for its update
    computing       F0 │ F1 │ F2 │ B2 │ B1 │ B0         waits for what it needs
    updating                          U2 ── U1 ── U0

Bytes are exact as long as every weight gets a gradient; seconds are as good as the costs. No tensor is touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from pipeback.runtime.loop import Loop
from pipeback.schedules.ops import Op
from pipeback.schedules.order import Wave

Choice = int | Literal["newest", "used", "shifted"]  # a version, or weights that are nobody else's
Choose = Callable[[str, int, int, int, int, int, int], Choice]  # (kind, stage, mb, version, start, base, entry)


class Load(NamedTuple):
    """What a stage weighs, in bytes, and takes, in seconds."""

    weights: int = 0  # of its place on the device
    gradients: int = 0
    activations: int = 0  # of one micro-batch, on the device
    repeat: int = 0  # of activations that are computed once more, until their backward is done
    sent: int | None = None  # of its weights, where they travel by one copy; None: all
    placed: int | None = None  # where one by one
    left: int | None = None  # of its gradients, when they leave; None: all
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
    """Bytes, by what they are of."""

    weights: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass
class Count:
    """What was moved, and what time passed."""

    weights_in: int = 0
    fetches: int = 0
    gradients_out: int = 0
    sums_in: int = 0
    updates: list[int] = field(default_factory=list)  # of each stage
    spills: list[int] = field(default_factory=list)  # times that sums of gradients went to the store
    stall: float = 0.0
    seconds: float = 0.0

    def since(self, before: Count) -> Count:
        """What came after `before` was taken."""
        values: dict[str, Any] = {}
        for one in fields(self):
            now, then = getattr(self, one.name), getattr(before, one.name)
            values[one.name] = [a - b for a, b in zip(now, then, strict=True)] if isinstance(now, list) else now - then
        return Count(**values)

    def copy(self) -> Count:
        return Count(**{one.name: _copied(getattr(self, one.name)) for one in fields(self)})


class _Flight(NamedTuple):
    version: int
    owned: bool  # its weights are no version of the stage
    entry: int


class _Fetch(NamedTuple):
    op: Op | None
    ready: float
    version: int
    owned: bool


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
    """The worker of `stages`, which streams them with `prefetch`; None: all have their weights on the device for good.

    choose: what the method answers before an operation. hooks: whether it is asked before F and B.
    `run`, `settle`, `outside` and `residence` are what a `Loop` asks for.
    """

    samples = joins = False
    outside = ()  # nothing that anybody could change

    def __init__(
        self,
        loads: Mapping[int, Load],
        count: int,
        prefetch: int | None,
        choose: Choose = lambda *_: "newest",
        hooks: Mapping[str, bool] | None = None,
        needs_entry: bool = False,
    ) -> None:
        self.stages = {s: _Place(load) for s, load in loads.items()}
        self.count, self.choose, self.hooks, self.needs_entry = count, choose, hooks or {}, needs_entry
        self.resident = prefetch is None
        self.prefetch = len(loads) if prefetch is None else prefetch
        self.link, self.residence = _Nowhere(), self
        self.options: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        self.entries: dict[int, int] = {}
        self.entered = self.start = self.base = 0
        self.number = Count(updates=[0] * count, spills=[0] * count)
        self.now = 0.0
        self.here = Room()  # on the device
        self.most = Room()  # when it was fullest
        self.peak_weights = self.peak_stages = 0
        self.host_gradients = self._spilled = 0  # in host memory, at most and for now
        self._last = max(self.stages)
        self._pool: list[int] = []
        self._needed: set[int] = set()
        self._fetches: dict[int, _Fetch] = {}
        self._updates: dict[int, float] = {}  # when the last of each stage is done
        self._queued = deque[int](maxlen=self.prefetch + 1)  # gradients of updates that may be under way
        self._fetching = self._updating = 0.0  # when each lane is free
        if self.resident:
            for s in self.stages:
                self._admit(s)

    # -- what a loop asks for ------------------------------------------------------------------------------------

    def run(self, waves: Iterable[Wave]) -> None:
        """Count the own part of every wave."""
        begin = self.now
        ops = [(kind, s, i) for kind, wave in waves for s, i in wave]
        own = [op for op in ops if self._comes(op[1])]
        visits = [op for n, op in enumerate(own) if not n or own[n - 1][1] != op[1]]
        at, turn = -1, 0
        for kind, s, i in ops:
            if s != at and self._comes(s):
                at, turn = s, turn + 1
                if not self.resident:
                    self._plan(visits[turn - 1 : turn + self.prefetch])
            if self.needs_entry and s == 0:
                if kind == "U":
                    self.entered += 1
                elif kind == "F":
                    self.entries[i] = self.entered
            if s in self.stages:
                (self._forward if kind == "F" else self._backward if kind == "B" else self._update)(s, i)
        self.number.seconds += self.now - begin

    def _comes(self, s: int) -> bool:
        """Whether the stage is an own one, with weights that come to the device."""
        return s in self.stages and self.stages[s].load.weights > 0

    def settle(self) -> None:
        """No replica is waited for."""

    def rest(self) -> None:
        """As when the pipeline quiesces: updates are done, and all weights are in the store."""
        begin = self.now
        self._wait(max([self.now, *self._updates.values()]))
        self._updates.clear()
        self._needed = set()
        while self._pool and not self.resident:
            self._dismiss(self._pool[0])
        self.number.seconds += self.now - begin

    # -- operations ----------------------------------------------------------------------------------------------

    def _forward(self, s: int, i: int) -> None:
        place = self.stages[s]
        entry = 0
        if self.needs_entry:
            entry = self.entries[i]
        brought = self._bring(s, Op("F", i), entry)
        if s == self._last:
            self.entries.pop(i, None)
            self.options.pop(i, None)
        place.flights[i] = _Flight(brought.version, brought.owned, entry)
        place.peak_flights = max(place.peak_flights, len(place.flights))
        self._hold(activations=place.load.activations)
        self._while(place.load.forward, place.load.away)

    def _backward(self, s: int, i: int) -> None:
        place = self.stages[s]
        self._bring(s, Op("B", i), place.flights[i].entry)
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

    def _update(self, s: int, i: int) -> None:
        place = self.stages[s]
        size = place.load.gradients
        if place.spilled:
            self._return(place)
        elif place.count:
            self._hold(gradients=-size)
        self.number.updates[s] += 1
        place.count, place.version = 0, place.version + 1
        if self.resident:
            self.now += place.load.update
            return
        self.number.gradients_out += place.leaving
        while len(under_way := sorted(end for end in self._updates.values() if end > self.now)) > self.prefetch:
            self._wait(under_way[0])
        self._updating = max(self._updating, self.now + place.load.leave) + place.load.update
        self._updates[s] = self._updating
        self._queued.append(place.leaving)
        self._keep(0)

    # -- weights that come and go --------------------------------------------------------------------------------

    def _plan(self, visits: Iterable[tuple[str, int, int]]) -> None:
        chosen: dict[int, Op] = {}
        for kind, t, i in visits:
            chosen.setdefault(t, Op(kind, i))  # type: ignore[arg-type]
        self._needed = set(chosen)
        for t, op in chosen.items():
            if op.kind != "U" and not (self.hooks.get(op.kind) and self.needs_entry):
                self._begin(t, op, self._entry(op.kind, t, op.mb))

    def _entry(self, kind: str, s: int, i: int) -> int:
        flight = self.stages[s].flights.get(i)
        return 0 if flight is None or kind == "F" else flight.entry

    def _bring(self, s: int, op: Op, entry: int) -> _Fetch:
        if self.resident or not self._comes(s):
            return _Fetch(None, self.now, self.stages[s].version, False)
        if s not in self._needed:
            self._needed = {s}
        self._begin(s, op, entry)
        fetch = self._fetches.pop(s)
        self._wait(fetch.ready)
        return fetch

    def _begin(self, s: int, op: Op, entry: int) -> None:
        place = self.stages[s]
        asks = self.hooks.get(op.kind, False)
        key = op if asks else None
        before = self._fetches.get(s)
        if before is not None and before.op == key:
            return
        if before is not None:
            self.now = max(self.now, before.ready)
        if not asks and place.content == place.version:
            self._fetches[s] = _Fetch(key, self.now, place.version, False)
            return
        self._admit(s)
        self._fetches[s] = self._fetch(s, place, op if asks and place.load.gradients else None, key, entry)

    def _fetch(self, s: int, place: _Place, op: Op | None, key: Op | None, entry: int) -> _Fetch:
        """What the fetching thread does. op: the method is asked before it."""
        begin = max(self._fetching, self.now, self._updates.get(s, 0.0))
        version = place.version
        wanted: int | None = version  # to lie there; None: shifted weights
        owned = False
        if op is not None:
            begin += place.load.ask
            flight = place.flights.get(op.mb)
            choice = self.choose(op.kind, s, op.mb, version, self.start, self.base, entry)
            if choice == "used" and flight is not None:
                wanted, version = None if flight.owned else flight.version, flight.version
            elif choice == "shifted":
                wanted, owned = None, op.kind == "F"
            elif isinstance(choice, int):
                wanted = version = choice
        if wanted is None or place.content != wanted:
            load = place.load
            sent = load.placed if wanted != place.version or wanted is None else load.sent
            self.number.weights_in += load.weights if sent is None else sent
            self.number.fetches += 1
            begin += place.load.fetch
            place.content = wanted
        self._fetching = begin
        return _Fetch(key, begin, version, owned)

    def _admit(self, s: int) -> None:
        if s in self._pool:
            return
        while len(self._pool) > self.prefetch:
            self._dismiss(next(other for other in self._pool if other not in self._needed))
        self._pool.append(s)
        self.peak_stages = max(self.peak_stages, len(self._pool))
        self._hold(weights=self.stages[s].load.weights)
        self.peak_weights = max(self.peak_weights, self.here.weights)

    def _dismiss(self, s: int) -> None:
        place = self.stages[s]
        before = self._fetches.pop(s, None)
        if before is not None:
            self.now = max(self.now, before.ready)
        if place.count and not place.spilled and place.load.gradients:
            place.spilled = True
            self.number.gradients_out += place.leaving
            self.number.spills[s] += 1
            self._hold(gradients=-place.load.gradients)
            self._keep(place.leaving)
            self.now += place.load.leave
        self._pool.remove(s)
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
        """Gradients in host memory: sums that left with their stage, and those of updates under way."""
        self._spilled += size
        self.host_gradients = max(self.host_gradients, self._spilled + sum(self._queued))


class _Nowhere:
    """A link that nothing goes through."""

    def enter(self, *message: Any) -> None: ...

    def send(self, *message: Any) -> None: ...


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def drive(loop: Loop, pushed: int) -> None:
    """One push of so many micro-batches."""
    loop.push([(None, None, 1)] * pushed, None)  # type: ignore[arg-type]
