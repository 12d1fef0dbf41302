"""Fetch policy: decides which stages come to the device, when, and with which weights, without tensors or threads.

    operations   F0  F0 │ F1 │ F2 │ B2 │ …        consecutive operations of one stage are a visit
    needed            the stages of this visit and of the `prefetch` next ones; they are fetched when it begins
    admitted          at most prefetch + 1 stages; the oldest one that is not needed makes room for another one

Two drivers carry out its decisions: `StreamedWeights` with real weights, and `pipeback.plan.dry_run` with numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from pipeback.methods.base import Method, Past, overrides
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.order import Wave

Choice = int | Literal["newest", "used", "shifted"]  # a version, or shifted weights, which are no version
Fetch = TypeVar("Fetch")


class Driver(Protocol[Fetch]):
    """Brings and holds the weights of stages. A `Fetch` is the driver's record of a fetch that it has begun."""

    def comes(self, stage: int) -> bool:
        """Whether the stage belongs to this driver and has weights that come to the device."""

    def lies(self, stage: int) -> bool:
        """Whether the newest weights of the stage lie on the device."""

    def found(self, stage: int) -> Fetch:
        """Return a finished fetch for newest weights that lie there already."""

    def fetch(self, stage: int, op: Op, asks: bool) -> Fetch:
        """Begin to bring the weights on which `op` runs. asks: whether the method chooses them."""

    def end(self, fetch: Fetch) -> None:
        """Wait until an unused fetch has ended, whether it failed or not."""

    def admit(self, stage: int) -> None:
        """Give the stage a place on the device."""

    def dismiss(self, stage: int) -> None:
        """Free the stage's place, and all its tensors there."""


class FetchPolicy(Generic[Fetch]):
    """The decisions for the stages of one worker.

    here: the stages that are on the device, the one that came first at the front.
    """

    def __init__(self, driver: Driver[Fetch], prefetch: int, asks: Mapping[Kind, bool], needs_entry: bool) -> None:
        """asks: whether the method chooses the weights of a forward (F) or backward (B). needs_entry: see `Method`."""
        self.driver, self.prefetch, self.asks, self.needs_entry = driver, prefetch, asks, needs_entry
        self.here: list[int] = []
        self.peak_stages = 0
        self._needed: set[int] = set()  # stages needed by this visit and the next ones
        self._fetches: dict[int, tuple[Op | None, Fetch]] = {}  # fetches that were begun and not used, by stage

    # -- looking ahead -------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave]) -> Iterator[Wave]:
        """Yield the operations one by one; at the begin of a visit, fetch the weights for it and the next ones."""
        source, queue, visits = _singles(waves), deque[Wave](), deque[tuple[int, Op]]()
        at, more, pulled = -1, True, -1
        while True:
            while more and (len(visits) <= self.prefetch or not queue):
                wave = next(source, None)
                if wave is None:
                    more = False
                    break
                queue.append(wave)
                (s, i) = wave.ops[0]
                if s != pulled and self.driver.comes(s):
                    pulled = s
                    visits.append((s, Op(wave.kind, i)))
            if not queue:
                return
            wave = queue.popleft()
            s = wave.ops[0][0]
            if s != at and self.driver.comes(s):
                at = s
                self._plan(visits)
                visits.popleft()
            yield wave

    def _plan(self, visits: Iterable[tuple[int, Op]]) -> None:
        """Begin the first of these visits, and fetch for as many of the others as there is room for."""
        chosen: dict[int, Op] = {}  # the first operation of a stage: after it, the stage may need other weights
        for t, op in visits:
            if len(chosen) <= self.prefetch:
                chosen.setdefault(t, op)
        self._needed = set(chosen)
        for t, op in chosen.items():
            # the answer of a method with `needs_entry` may be unknown until its turn comes
            if op.kind != "U" and not (self.asks[op.kind] and self.needs_entry):
                self.begin(t, op)

    # -- one operation -------------------------------------------------------------------------------------------

    def begin(self, stage: int, op: Op) -> Fetch:
        """Begin to bring the weights of an operation, unless they are there or on their way."""
        asks = self.asks[op.kind]
        key = op if asks else None  # a method that is not asked runs all operations on the newest weights
        if stage in self._fetches:
            before, fetch = self._fetches[stage]
            if before == key:
                return fetch
            self.driver.end(fetch)
        if not asks and self.driver.lies(stage):
            fetch = self.driver.found(stage)
        else:
            self._admit(stage)
            fetch = self.driver.fetch(stage, op, asks)
        self._fetches[stage] = key, fetch
        return fetch

    def use(self, stage: int, op: Op) -> Fetch:
        """Return the fetch for an operation whose turn has come; the driver waits for it."""
        if stage not in self._needed:
            self._needed = {stage}
        fetch = self.begin(stage, op)
        del self._fetches[stage]
        return fetch

    # -- room ----------------------------------------------------------------------------------------------------

    def vacate(self) -> None:
        """Remove all stages from the device."""
        self._needed = set()
        while self.here:
            self._dismiss(self.here[0])

    def _admit(self, stage: int) -> None:
        if stage in self.here:
            return
        while len(self.here) > self.prefetch:
            self._dismiss(next(other for other in self.here if other not in self._needed))
        self.here.append(stage)
        self.peak_stages = max(self.peak_stages, len(self.here))
        self.driver.admit(stage)

    def _dismiss(self, stage: int) -> None:
        if stage in self._fetches:
            self.driver.end(self._fetches.pop(stage)[1])
        self.driver.dismiss(stage)
        self.here.remove(stage)


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


def _singles(waves: Iterable[Wave]) -> Iterator[Wave]:
    for kind, ops in waves:
        for op in ops:
            yield Wave(kind, [op])
