"""Fetch policy: which stages come to the device, when, and with which weights. It has no tensors and no threads.

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

Choice = int | Literal["newest", "used", "shifted"]  # a version, or weights that are nobody else's
Fetch = TypeVar("Fetch")


class Driver(Protocol[Fetch]):
    """Brings and holds the weights of stages; a `Fetch` is the driver's record of one that it has begun."""

    def comes(self, stage: int) -> bool:
        """Whether the stage is one of its own, with weights that come to the device."""

    def lies(self, stage: int) -> bool:
        """Whether the newest weights of the stage lie on the device."""

    def found(self, stage: int) -> Fetch:
        """The fetch of newest weights that lie there already."""

    def fetch(self, stage: int, op: Op, asks: bool) -> Fetch:
        """Begin to bring the weights that `op` runs on; `asks`: the method chooses them."""

    def end(self, fetch: Fetch) -> None:
        """Wait until a fetch has ended that nobody has come to use, whether it failed or not."""

    def admit(self, stage: int) -> None:
        """Give the stage its place on the device."""

    def dismiss(self, stage: int) -> None:
        """Take the place away, and what belongs to the stage with it."""


class FetchPolicy(Generic[Fetch]):
    """The decisions for the stages of one worker.

    here: the stages that are on the device, the one that came first at the front.
    """

    def __init__(self, driver: Driver[Fetch], prefetch: int, asks: Mapping[Kind, bool], needs_entry: bool) -> None:
        """asks: whether the method chooses what an F or B runs on. needs_entry: see `Method`."""
        self.driver, self.prefetch, self.asks, self.needs_entry = driver, prefetch, asks, needs_entry
        self.here: list[int] = []
        self.peak_stages = 0
        self._needed: set[int] = set()  # by the visit at hand and those that come
        self._fetches: dict[int, tuple[Op | None, Fetch]] = {}  # begun and not yet used, by stage

    # -- looking ahead -------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave]) -> Iterator[Wave]:
        """The same operations one by one; when a visit begins, what it and the next ones run on is fetched."""
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
        """The first of these visits begins, the others come: as many are fetched as there is room for."""
        chosen: dict[int, Op] = {}  # a stage's first visit: after it, it may need something else
        for t, op in visits:
            if len(chosen) <= self.prefetch:
                chosen.setdefault(t, op)
        self._needed = set(chosen)
        for t, op in chosen.items():
            # what a method with `needs_entry` is asked for may not be known before its turn comes
            if op.kind != "U" and not (self.asks[op.kind] and self.needs_entry):
                self.begin(t, op)

    # -- one operation -------------------------------------------------------------------------------------------

    def begin(self, stage: int, op: Op) -> Fetch:
        """Have what the operation runs on brought, unless it is there or on its way."""
        asks = self.asks[op.kind]
        key = op if asks else None  # where the method is not asked, all operations run on the newest weights
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
        """What the operation, whose turn has come, runs on: its driver waits for it."""
        if stage not in self._needed:
            self._needed = {stage}
        fetch = self.begin(stage, op)
        del self._fetches[stage]
        return fetch

    # -- room ----------------------------------------------------------------------------------------------------

    def vacate(self) -> None:
        """Let all stages go from the device."""
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
    """Which weights an operation finds on the device."""

    version: int  # that the operation counts as run on: shifted weights are of the newest one
    lies: int | None  # the version that lies there; None: weights that are no version


def brings(choice: Choice, newest: int, used: int | None = None, *, owned: bool = False) -> Brings:
    """What a choice means. used: the version that the micro-batch's F ran on, whose weights were shifted if `owned`."""
    if choice == "used" and used is not None:
        return Brings(used, None if owned else used)
    if choice == "shifted":
        return Brings(newest, None)
    version = choice if isinstance(choice, int) else newest
    return Brings(version, version)


def choice_of(chosen: object, newest: object, used: object | None) -> Choice:
    """The choice that a method's answer means, given the newest weights and, if it keeps them, those that F used."""
    if chosen is used:
        return "used"
    if chosen is newest:
        return "newest"
    return chosen.version if isinstance(chosen, Past) else "shifted"


def asks(method: Method) -> dict[Kind, bool]:
    """Whether a method is asked for the weights of F and of B."""
    return {
        "F": overrides(method, "forward_weights"),
        "B": overrides(method, "backward_weights") or method.copies == "stash",
    }


def _singles(waves: Iterable[Wave]) -> Iterator[Wave]:
    for kind, ops in waves:
        for op in ops:
            yield Wave(kind, [op])
