"""Fetch policy: decides which stages come to the device, when, and with which weights, without tensors or threads.

    operations   F0  F0 │ F1 │ F2 │ B2 │ …        consecutive operations of one stage are a visit
    needed            the stages of this visit and of the `prefetch` next ones; they are fetched when it begins
    admitted          at most prefetch + 1 stages; the oldest one that is not needed makes room for another one

Stages that run as one are a *unit*, which comes and goes as a single stage does; any other stage is a unit by itself.
With the order "skewed", no operation of a tick feeds another one of it, so that a unit does all its operations of a
tick at one visit: F, B and U.

Two drivers carry out its decisions: `StreamedWeights` with real weights, and `pipeback.plan.dry_run` with numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from pipeback.methods.base import Method, Past, overrides
from pipeback.schedules.ops import Kind
from pipeback.schedules.order import Wave

Choice = int | Literal["newest", "used", "shifted"]  # a version, or shifted weights, which are no version
Fetch = TypeVar("Fetch")
KINDS = ("F", "B", "U")  # of operations, in the order in which a tick has them


class Driver(Protocol[Fetch]):
    """Brings and holds the weights of units. A `Fetch` is the driver's record of a fetch that it has begun."""

    def unit(self, stage: int) -> int:
        """Return the unit of a stage: the number of its first stage."""

    def size(self, unit: int) -> int:
        """Return how many stages the unit has."""

    def comes(self, unit: int) -> bool:
        """Whether the unit belongs to this driver and has weights that come to the device."""

    def lies(self, unit: int) -> bool:
        """Whether the newest weights of the unit lie on the device."""

    def found(self, unit: int) -> Fetch:
        """Return a finished fetch for newest weights that lie there already."""

    def fetch(self, unit: int, wave: Wave, asks: bool) -> Fetch:
        """Begin to bring the weights on which these operations run. asks: whether the method chooses them."""

    def end(self, fetch: Fetch) -> None:
        """Wait until an unused fetch has ended, whether it failed or not."""

    def admit(self, unit: int) -> None:
        """Give the unit a place on the device."""

    def dismiss(self, unit: int) -> None:
        """Free the unit's place, and all its tensors there."""


class FetchPolicy(Generic[Fetch]):
    """The decisions for the units of one worker.

    here: the units that are on the device, the one that came first at the front. prefetch: how many of them are fetched
    ahead.
    """

    def __init__(self, driver: Driver[Fetch], prefetch: int, asks: Mapping[Kind, bool], needs_entry: bool) -> None:
        """asks: whether the method chooses the weights of a forward (F) or backward (B). needs_entry: see `Method`."""
        self.driver, self.prefetch, self.asks, self.needs_entry = driver, prefetch, asks, needs_entry
        self.here: list[int] = []
        self.peak_stages = 0
        self._needed: set[int] = set()  # units needed by this visit and the next ones
        self._fetches: dict[int, tuple[Wave | None, Fetch]] = {}  # fetches that were begun and not used, by unit

    # -- looking ahead -------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave], *, ticks: bool = False) -> Iterator[Wave]:
        """Yield the operations unit by unit; at the begin of a visit, fetch the weights for it and the next ones.

        ticks: whether the waves are those of ticks, of which a unit does all at one visit.
        """
        source = _visits(waves, self.driver.unit) if ticks else _singles(waves)
        queue, visits = deque[Wave](), deque[tuple[int, Wave]]()
        at, more, pulled = -1, True, -1
        while True:
            while more and (len(visits) <= self.prefetch or not queue):
                wave = next(source, None)
                if wave is None:
                    more = False
                    break
                queue.append(wave)
                unit = self.driver.unit(wave.ops[0][0])
                if unit != pulled and self.driver.comes(unit):
                    pulled = unit
                    visits.append((unit, wave))
            if not queue:
                return
            wave = queue.popleft()
            unit = self.driver.unit(wave.ops[0][0])
            if unit != at and self.driver.comes(unit):
                at = unit
                self._plan(visits)
                visits.popleft()
            yield wave

    def _plan(self, visits: Iterable[tuple[int, Wave]]) -> None:
        """Begin the first of these visits, and fetch for as many of the others as there is room for."""
        chosen: dict[int, Wave] = {}  # the first operations of a unit: after them, it may need other weights
        for t, wave in visits:
            if len(chosen) <= self.prefetch:
                chosen.setdefault(t, wave)
        self._needed = set(chosen)
        for t, wave in chosen.items():
            # the answer of a method with `needs_entry` may be unknown until its turn comes
            if wave.kind != "U" and not (self.asks[wave.kind] and self.needs_entry):
                self.begin(t, wave)

    # -- the operations of a unit of one kind ----------------------------------------------------------------------

    def begin(self, unit: int, wave: Wave) -> Fetch:
        """Begin to bring the weights of these operations, unless they are there or on their way."""
        asks = self.asks[wave.kind]
        key = wave if asks else None  # a method that is not asked runs all operations on the newest weights
        if unit in self._fetches:
            before, fetch = self._fetches[unit]
            if before == key:
                return fetch
            self.driver.end(fetch)
        if not asks and self.driver.lies(unit):
            fetch = self.driver.found(unit)
        else:
            self._admit(unit)
            fetch = self.driver.fetch(unit, wave, asks)
        self._fetches[unit] = key, fetch
        return fetch

    def use(self, unit: int, wave: Wave) -> Fetch:
        """Return the fetch for operations whose turn has come; the driver waits for it."""
        if unit not in self._needed:
            self._needed = {unit}
        fetch = self.begin(unit, wave)
        del self._fetches[unit]
        return fetch

    # -- room ----------------------------------------------------------------------------------------------------

    def vacate(self) -> None:
        """Remove all units from the device."""
        self._needed = set()
        while self.here:
            self._dismiss(self.here[0])

    def _admit(self, unit: int) -> None:
        if unit in self.here:
            return
        while len(self.here) > self.prefetch:
            self._dismiss(next(other for other in self.here if other not in self._needed))
        self.here.append(unit)
        self.peak_stages = max(self.peak_stages, sum(map(self.driver.size, self.here)))
        self.driver.admit(unit)

    def _dismiss(self, unit: int) -> None:
        if unit in self._fetches:
            self.driver.end(self._fetches.pop(unit)[1])
        self.driver.dismiss(unit)
        self.here.remove(unit)


def units_ahead(prefetch: int, sizes: Iterable[int]) -> int:
    """Return how many units are fetched ahead, if so many stages may be. sizes: those of the units."""
    return max(0, (prefetch + 1) // max(sizes, default=1) - 1)


def together(prefetch: int) -> int:
    """Return how many stages may be a unit, if so many are fetched ahead: half of those that have room, so that the
    next unit comes while one computes.
    """
    return max(1, (prefetch + 1) // 2)


class Brings(NamedTuple):
    """The weights that an operation finds on the device."""

    version: int  # the version that counts as used; shifted weights have the newest
    lies: int | None  # the version on the device; None if shifted weights are there


def brings(choice: Choice, newest: int, used: int | None = None, *, owned: bool = False) -> Brings:
    """Return the weights for a choice. used: the version that the micro-batch's F used; owned: these were shifted."""
    if choice == "used" and used is not None:
        return Brings(used, None if owned else used)
    if choice == "shifted":
        return Brings(newest, None)
    version = choice if isinstance(choice, int) else newest
    return Brings(version, version)


def choice_of(chosen: object, newest: object, used: object | None) -> Choice:
    """Return a method's answer as a choice, given the newest weights and, if it keeps them, those that F used."""
    if chosen is used:
        return "used"
    if chosen is newest:
        return "newest"
    return chosen.version if isinstance(chosen, Past) else "shifted"


def asks(method: Method) -> dict[Kind, bool]:
    """Return whether a method chooses the weights of F, and of B."""
    return {
        "F": overrides(method, "forward_weights"),
        "B": overrides(method, "backward_weights") or method.copies == "stash",
    }


def _visits(waves: Iterable[Wave], unit: Callable[[int], int]) -> Iterator[Wave]:
    """Yield the waves of ticks unit by unit.

    A tick is recognised by its kinds, which come in the order F, B, U. Of two ticks that complete each other, such as
    one with forwards alone and one with backwards alone, no operation feeds one of another stage either.
    """
    tick: list[Wave] = []
    for wave in waves:
        if tick and KINDS.index(wave.kind) <= KINDS.index(tick[-1].kind):
            yield from _apart(tick, unit)
            tick = []
        tick.append(wave)
    yield from _apart(tick, unit)


def _apart(tick: Sequence[Wave], unit: Callable[[int], int]) -> Iterator[Wave]:
    parts: dict[int, dict[Kind, list[tuple[int, int]]]] = {}
    for kind, ops in tick:
        for op in ops:
            parts.setdefault(unit(op[0]), {}).setdefault(kind, []).append(op)
    for _, part in sorted(parts.items()):
        for kind, some in part.items():
            yield Wave(kind, some)


def _singles(waves: Iterable[Wave]) -> Iterator[Wave]:
    for kind, ops in waves:
        for op in ops:
            yield Wave(kind, [op])
