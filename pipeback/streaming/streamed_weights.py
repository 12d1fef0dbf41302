"""Streamed weights: a weight provider for weights that live in a store and come to the device for an operation.

    fetching  one thread    W1 ──── W2 ──── W3 ────             copies weights to the device, one stage ahead
    computing               F0 │ F1 │ F2 │ B2 │ B1 │ B0         runs the stage that the order names
    updating  one thread                      U2 ── U1 ── U0    steps the weights in the store

Only a stage's own next fetch waits for its update. At most `prefetch + 1` stages are on the device. `fetch_policy`
decides what is fetched and when; the updates are `store_updates`. Stages that run as one are fetched by one copy, and
updated together (`joined_homes`).

F is the forward, B the backward, U the update. If a stage's weights are split over the stores of several ranks
(`shards`), a fetch gathers them, and an update begins by sending the gradient sums to the owners. Both threads then
wait for other ranks, so their actions and the order of these must depend on the operations alone. This is why nothing
stays on the device between two runs of operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from pipeback.methods.base import Method, Past, Shift
from pipeback.runtime.chosen_weights import ChosenWeights, HookCall
from pipeback.runtime.weight_provider import Ask, forget_casts
from pipeback.schedules.ops import Kind
from pipeback.schedules.order import Ops, Wave
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.gradients import GradientSums
from pipeback.stages.joined_homes import JoinedHomes
from pipeback.stages.stage import Stage
from pipeback.streaming.cuda_copies import CudaCopies
from pipeback.streaming.fetch_policy import FetchPolicy, asks, brings, choice_of, units_ahead
from pipeback.streaming.job_thread import JobThread
from pipeback.streaming.shards import ReplicaGroup
from pipeback.streaming.store import Store, lay
from pipeback.streaming.store_updates import StoreUpdates
from pipeback.streaming.traffic import Meter, Traffic
from pipeback.tensors.weight_list import Weights, add_scaled


class Brought(NamedTuple):
    """The weights that were brought for an operation."""

    version: int  # the version that counts as used; shifted weights have the newest
    owned: Weights | None = None  # shifted weights that B needs again


Fetched = dict[int, Brought]  # of the stages of a unit, by number


class StreamedWeights:
    """Brings the weights of a worker's stages to their operations, at most store.prefetch + 1 stages at once."""

    joins = False

    def __init__(
        self, stages: Mapping[int, Stage], method: Method, store: Store, column: ReplicaGroup | None = None
    ) -> None:
        """column: the group of ranks over whose stores the weights are split; None: they are not split."""
        self.stages, self.chosen, self.store, self.column = stages, ChosenWeights(method), store, column
        self.alone = column is None
        self.ask: Ask = lambda kind, ops: []
        self._stash = method.copies == "stash"
        self._policy = FetchPolicy[Future[Fetched]](self, store.prefetch, asks(method), method.needs_entry)
        self._units: dict[int, list[Stage]] = {}  # by the number of the first stage
        self._unit_of: dict[int, int] = {}
        self._ticks = False
        self._meter = Meter(None if column is None else column.stalled)
        self._streams = CudaCopies(stages.values())
        self._updates = StoreUpdates(store, column, self._streams, self._meter)
        self._fetching = JobThread("pipeback fetching")
        self._peak_bytes = 0
        self._group()

    def _group(self) -> None:
        """Find out which stages run as one; none may be on the device.

        A stage that no longer does gets memory of its own, once no graph in flight refers to shared memory.
        """
        stages = self.stages.values()
        for stage in stages:
            joined = stage.home.joined
            if stage.stack is None and joined is not None and joined.count > 1 and not stage.flights:
                self._updates.wait(stage.index)
                JoinedHomes([stage])
        some = [[stage] if stage.stack is None else list(stage.stack.stages) for stage in stages]
        self._units = {unit[0].index: unit for unit in some}
        self._unit_of = {stage.index: first for first, unit in self._units.items() for stage in unit}
        self._ticks = any(stage.stack is not None for stage in stages)
        self._policy.prefetch = units_ahead(self.store.prefetch, map(len, self._units.values()))

    def compare(self, given: int) -> None:
        """Compare with the other replicas how many micro-batches they were given, where these fetch together."""
        if self.column is not None:
            self._fetching.submit(partial(self.column.compare, given)).result()

    # -- operations ----------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave]) -> Iterator[Wave]:
        """Yield the operations unit by unit, while the weights of the next units are fetched."""
        begin = time.perf_counter()
        if not self._policy.here:
            self._group()
        try:
            yield from self._policy.ahead(waves, ticks=self._ticks)
            if self.column is not None:
                self._policy.vacate()  # so that a call of `rest` here does not change the next fetches
        finally:
            self._meter.add(seconds=time.perf_counter() - begin)

    def forward(self, ops: Ops) -> list[Brought]:
        """Wait for the weights of these forwards, of one unit."""
        brought = self._bring(Wave("F", list(ops)))
        return [brought[s] for s, _ in ops]

    def after_forward(self, held: Sequence[Brought], ops: Ops) -> None:
        """Record in the flights which weights they used."""
        for (s, i), brought in zip(ops, held, strict=True):
            flight = self.stages[s].flights.get(i)
            if flight is not None:  # None if its forward has failed
                flight.version = brought.version
                if brought.owned is not None:
                    self.stages[s].versions.own(flight, brought.owned)
                    self.store.put(self.stages[s])
        forget_casts()

    def backward(self, ops: Ops) -> tuple[list[Brought], dict[int, int]]:
        """Wait for the weights of these backwards, of one unit, and for the gradient sums to which they add."""
        brought = self._bring(Wave("B", list(ops)))
        for s, _ in ops:
            self._updates.collect(self.stages[s])
        return [brought[s] for s, _ in ops], {s: brought[s].version for s, _ in ops}

    def after_backward(self, held: Sequence[Brought]) -> None:
        """Do nothing, since the weights stay until their room is needed."""

    def collect(self, stage: Stage) -> None:
        """Bring back the gradient sums that left the device."""
        self._updates.collect(stage)

    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None:
        """Send the gradients to the store, which makes the update while other stages compute."""
        self._updates.begin(stages, make)

    def ready(self, kind: Kind, stage: int, mb: int) -> None:
        """Wait until the weights of an operation of a stage, which is a unit by itself, are on the device."""
        if kind != "U" and self._slot(stage).nbytes:
            self._updates.check()
            fetch = self._policy.begin(stage, Wave(kind, [(stage, mb)]))
            with self._meter.stalling():
                fetch.exception()

    @property
    def moves(self) -> list[tuple[float, float, str, int]]:
        """The recorded fetches and updates."""
        return self._meter.moves

    def record(self, on: bool) -> None:
        """Record the fetches and updates from now on."""
        self._meter.record(on)

    @contextmanager
    def newest(self, stage: Stage) -> Iterator[None]:
        """A context in which `stage.weights` are the newest ones and can be read."""
        self._updates.wait(stage.index, stalls=True)
        with self.store.opened(stage):
            yield

    def rest(self) -> None:
        """Wait until no transfer is running and all weights are in the store; raise the error of a failed transfer."""
        begin = time.perf_counter()
        self._updates.rest()
        self._policy.vacate()
        self._meter.add(seconds=time.perf_counter() - begin)

    def close(self) -> None:
        """Stop the threads, and remove all stages from the device, also after an error."""
        self._fetching.close()
        self._updates.close()
        while self._policy.here:
            for stage in self._units[self._policy.here.pop()]:
                self._slot(stage.index).leave()

    @property
    def traffic(self) -> Traffic:
        """The traffic since the beginning."""
        return self._meter.traffic._replace(peak_stages=self._policy.peak_stages, peak_bytes=self._peak_bytes)

    # -- the driver of the policy --------------------------------------------------------------------------------

    def unit(self, stage: int) -> int:
        return self._unit_of.get(stage, -1)

    def size(self, unit: int) -> int:
        return len(self._units[unit])

    def comes(self, unit: int) -> bool:
        return unit in self._units and self._slot(unit).nbytes > 0

    def lies(self, unit: int) -> bool:
        return all(self._slot(stage.index).content == stage.version for stage in self._units[unit])

    def found(self, unit: int) -> Future[Fetched]:
        done: Future[Fetched] = Future()
        done.set_result({stage.index: Brought(stage.version) for stage in self._units[unit]})
        return done

    def fetch(self, unit: int, wave: Wave, asks: bool) -> Future[Fetched]:
        asked = {(s, i): self.ask(wave.kind, [(s, i)]) for s, i in wave.ops} if asks else {}
        stages = [self.stages[s] for s, _ in wave.ops] if asks else self._units[unit]
        self._streams.given(self._slot(unit))
        versions = [(stage, stage.version) for stage in stages]
        return self._fetching.submit(partial(self._fetch, unit, versions, wave.kind, asked))

    def end(self, fetch: Future[Fetched]) -> None:
        fetch.exception()

    def admit(self, unit: int) -> None:
        for stage in self._units[unit]:
            self._slot(stage.index).arrive()
        there = (self._slot(stage.index).nbytes for each in self._policy.here for stage in self._units[each])
        self._peak_bytes = max(self._peak_bytes, sum(there))

    def dismiss(self, unit: int) -> None:
        """Remove a unit from the device, together with its gradient sums."""
        stages = self._units[unit]
        self._streams.arrived(self._slot(unit))
        if stages[0].stack is not None:
            stages[0].stack.spread()
        for stage in stages:
            self._updates.spill(stage)
            self._slot(stage.index).leave()

    def _slot(self, s: int) -> DeviceSlot:
        slot = self.stages[s].home.slot
        assert slot is not None
        return slot

    # -- fetching ------------------------------------------------------------------------------------------------

    def _bring(self, wave: Wave) -> Fetched:
        """Bring the weights of these operations, of one unit, now."""
        unit = self._unit_of[wave.ops[0][0]]
        slot = self._slot(unit)
        if not slot.nbytes:  # stages without parameters
            return {stage.index: Brought(stage.version) for stage in self._units[unit]}
        self._updates.check()
        fetch = self._policy.use(unit, wave)
        if not fetch.done():
            with self._meter.stalling():
                fetch.exception()
        brought = fetch.result()
        self._streams.arrived(slot)
        return brought

    def _fetch(
        self,
        unit: int,
        stages: Sequence[tuple[Stage, int]],
        kind: Kind,
        asked: Mapping[tuple[int, int], Sequence[HookCall]],
    ) -> Fetched:
        """Ask the method in the fetching thread, and copy the weights that it chooses, for these stages of a unit.

        stages: with their newest versions. asked: the questions, by stage and micro-batch; none: the newest are wanted.
        """
        for each in self._units[unit]:
            self._updates.wait(each.index)
        with self._meter.moving("fetch", unit), torch.no_grad(), self._streams.fetching(self._slot(unit)):
            if not asked:
                return self._newest(stages)
            found = {}
            for (stage, version), calls in zip(stages, asked.values(), strict=True):
                if calls:
                    with self.store.opened(stage):
                        found[stage.index] = self._chosen(stage, self._slot(stage.index), kind, calls[0], version)
                else:
                    found |= self._newest([(stage, version)])
            return found

    def _newest(self, stages: Sequence[tuple[Stage, int]]) -> Fetched:
        """Copy the newest weights of those that lack them, of a whole unit by one copy."""
        lacking = [(stage, version) for stage, version in stages if self._slot(stage.index).content != version]
        joined = stages[0][0].home.joined
        sent = joined.bring() if joined is not None and len(lacking) == joined.count else None
        for stage, version in lacking:
            if sent is None:
                self._copy(stage, self._slot(stage.index), version)
            self._slot(stage.index).came(version)
        if sent is not None:
            self._meter.add(weights_in=sent, fetches=len(lacking))
        return {stage.index: Brought(version) for stage, version in stages}

    def _chosen(self, stage: Stage, slot: DeviceSlot, kind: Kind, asked: HookCall, version: int) -> Brought:
        team, mb, _ = asked
        used, flight = None, stage.flights.get(mb)
        if kind == "F":
            chosen = self.chosen.forward(asked)
        else:
            used = stage.used(mb) if self._stash else None
            chosen = self.chosen.backward(asked, used)
        owned = None if flight is None else flight.owned
        before = None if flight is None else flight.version
        what = brings(choice_of(chosen, team.weights, used), version, before, owned=owned is not None)
        if what.lies is None and chosen is used:
            assert owned is not None
            with self.store.lent(stage, owned):
                self._place(stage, slot, owned, what.version)
        elif what.lies is None:
            assert not isinstance(chosen, Past)
            self._place(stage, slot, chosen, version)
            if self._stash and kind == "F":
                copies = [torch.empty_like(w) for w in stage.weights]
                torch._foreach_copy_(copies, list(stage.weights))
                _shift(copies, chosen)
                return Brought(version, copies)
        elif slot.content != what.lies and what.lies == version:
            self._copy(stage, slot, version)
        elif slot.content != what.lies:
            older = stage.past(what.lies)
            with self.store.lent(stage, older):
                self._place(stage, slot, older, what.lies)
            slot.came(what.lies)
        return Brought(what.version)

    def _copy(self, stage: Stage, slot: DeviceSlot, version: int) -> None:
        """Copy the newest weights directly from the store."""
        sent = self.store.read(stage, slot)
        slot.came(version)
        self._meter.add(weights_in=sent, fetches=1, gathered=_others(stage))

    def _place(self, stage: Stage, slot: DeviceSlot, chosen: Weights | Shift, version: int) -> None:
        """Copy weights from host memory, shifted there or on the device."""
        if (
            isinstance(chosen, Shift)
            and slot.device.type == "cpu"
            and stage.home.sparse is None
            and stage.home.share is None
        ):
            sent = lay(stage, slot, stage.weights, version)
            _shift(stage.live(), chosen)
        elif isinstance(chosen, Shift):
            shifted = [w.detach().clone() for w in stage.weights]
            _shift(shifted, chosen)
            sent = lay(stage, slot, shifted, version)
        else:
            sent = lay(stage, slot, chosen, version)
        slot.came(None)
        self._meter.add(weights_in=sent, fetches=1, gathered=_others(stage))


def _shift(weights: Weights, chosen: Weights | Shift) -> None:
    """Set `weights`, which are the newest ones, to the chosen ones."""
    if isinstance(chosen, Shift):
        add_scaled(weights, chosen.coefficients, chosen.directions)
    else:
        torch._foreach_copy_(weights, list(chosen))


def _others(stage: Stage) -> int:
    """Return the bytes of a stage's weights in other ranks' stores."""
    return 0 if stage.home.share is None else stage.home.share.nbytes - stage.home.share.share
