"""Streamed weights: a weight provider for weights that live in a store and come to the device for an operation.

    fetching  one thread    W1 ──── W2 ──── W3 ────             copies weights to the device, one stage ahead
    computing               F0 │ F1 │ F2 │ B2 │ B1 │ B0         runs the stage that the order names
    updating  one thread                      U2 ── U1 ── U0    steps the weights in the store

Only a stage's own next fetch waits for its update. At most `prefetch + 1` stages are on the device. `fetch_policy`
decides what is fetched and when; the updates are `store_updates`.

F is the forward, B the backward, U the update. If a stage's weights are split over the stores of several ranks
(`shards`), a fetch gathers them, and an update begins by sending the gradient sums to the owners. Both threads then
wait for other ranks, so their actions and the order of these must depend on the operations alone. This is why nothing
stays on the device between two runs of operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pipeback.methods.base import Method, Past, Shift
from pipeback.runtime.weight_provider import Ask, HookCall, forget_casts
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.order import Ops, Wave
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.gradients import GradientSums
from pipeback.stages.stage import Stage
from pipeback.streaming.cuda_copies import CudaCopies
from pipeback.streaming.fetch_policy import FetchPolicy, asks, brings, choice_of
from pipeback.streaming.shards import ReplicaGroup
from pipeback.streaming.store import Store, lay
from pipeback.streaming.store_updates import StoreUpdates
from pipeback.streaming.traffic import Meter, Traffic
from pipeback.tensors.weight_list import Weights, add_scaled


class Brought(NamedTuple):
    """The weights that were brought for an operation."""

    version: int  # the version that counts as used; shifted weights have the newest
    owned: Weights | None = None  # shifted weights that B needs again


class StreamedWeights:
    """Brings the weights of a worker's stages to their operations, at most store.prefetch + 1 stages at once."""

    joins = False

    def __init__(
        self, stages: Mapping[int, Stage], method: Method, store: Store, column: ReplicaGroup | None = None
    ) -> None:
        """column: the group of ranks over whose stores the weights are split; None: they are not split."""
        self.stages, self.method, self.store, self.column = stages, method, store, column
        self.alone = column is None
        self.ask: Ask = lambda kind, ops: []
        self._stash = method.copies == "stash"
        self._policy = FetchPolicy[Future[Brought]](self, store.prefetch, asks(method), method.needs_entry)
        self._meter = Meter(None if column is None else column.stalled)
        self._streams = CudaCopies(stages.values())
        self._updates = StoreUpdates(store, column, self._streams, self._meter)
        self._fetching = ThreadPoolExecutor(1, "pipeback fetching")
        self._peak_bytes = 0

    # -- operations ----------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave]) -> Iterator[Wave]:
        """Yield the operations one by one, while the weights of the next stages are fetched."""
        begin = time.perf_counter()
        try:
            yield from self._policy.ahead(waves)
            if self.column is not None:
                self._policy.vacate()  # so that a call of `rest` here does not change the next fetches
        finally:
            self._meter.add(seconds=time.perf_counter() - begin)

    def forward(self, ops: Ops) -> list[Brought]:
        """Wait for the weights of this forward."""
        ((s, i),) = ops
        return [self._bring(s, Op("F", i))]

    def after_forward(self, held: Sequence[Brought], ops: Ops) -> None:
        """Record in the flight which weights it used."""
        ((s, i),) = ops
        flight = self.stages[s].flights.get(i)
        if flight is not None:  # None if its forward has failed
            flight.version = held[0].version
            if held[0].owned is not None:
                self.stages[s].versions.own(flight, held[0].owned)
                self.store.put(self.stages[s])
        forget_casts()

    def backward(self, ops: Ops) -> tuple[list[Brought], dict[int, int]]:
        """Wait for the weights of this backward, and for the gradient sums to which it adds."""
        ((s, i),) = ops
        brought = self._bring(s, Op("B", i))
        self._updates.collect(self.stages[s])
        return [brought], {s: brought.version}

    def after_backward(self, held: Sequence[Brought]) -> None:
        """Do nothing, since the weights stay until their room is needed."""

    def collect(self, stage: Stage) -> None:
        """Bring back the gradient sums that left the device."""
        self._updates.collect(stage)

    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None:
        """Send the gradients to the store, which makes the update while other stages compute."""
        (stage,) = stages
        self._updates.begin(stage, make)

    def ready(self, kind: Kind, stage: int, mb: int) -> None:
        """Wait until the weights of an operation are on the device."""
        if kind != "U" and self._slot(stage).nbytes:
            self._updates.check()
            fetch = self._policy.begin(stage, Op(kind, mb))
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
        self._fetching.shutdown(cancel_futures=True)
        self._updates.close()
        while self._policy.here:
            self._slot(self._policy.here.pop()).leave()

    @property
    def traffic(self) -> Traffic:
        """The traffic since the beginning."""
        return self._meter.traffic._replace(peak_stages=self._policy.peak_stages, peak_bytes=self._peak_bytes)

    # -- the driver of the policy --------------------------------------------------------------------------------

    def comes(self, stage: int) -> bool:
        return stage in self.stages and self._slot(stage).nbytes > 0

    def lies(self, stage: int) -> bool:
        return self._slot(stage).content == self.stages[stage].version

    def found(self, stage: int) -> Future[Brought]:
        done: Future[Brought] = Future()
        done.set_result(Brought(self.stages[stage].version))
        return done

    def fetch(self, stage: int, op: Op, asks: bool) -> Future[Brought]:
        asked = self.ask(op.kind, [(stage, op.mb)]) if asks else []
        there, slot = self.stages[stage], self._slot(stage)
        self._streams.given(slot)
        return self._fetching.submit(self._fetch, there, slot, op, asked, there.version)

    def end(self, fetch: Future[Brought]) -> None:
        fetch.exception()

    def admit(self, stage: int) -> None:
        self._slot(stage).arrive()
        self._peak_bytes = max(self._peak_bytes, sum(self._slot(s).nbytes for s in self._policy.here))

    def dismiss(self, stage: int) -> None:
        """Remove a stage from the device, together with its gradient sums."""
        slot = self._slot(stage)
        self._streams.arrived(slot)
        self._updates.spill(self.stages[stage])
        slot.leave()

    def _slot(self, s: int) -> DeviceSlot:
        slot = self.stages[s].home.slot
        assert slot is not None
        return slot

    # -- fetching ------------------------------------------------------------------------------------------------

    def _bring(self, s: int, op: Op) -> Brought:
        """Bring the weights of this operation now."""
        slot = self._slot(s)
        if not slot.nbytes:  # a stage without parameters
            return Brought(self.stages[s].version)
        self._updates.check()
        fetch = self._policy.use(s, op)
        if not fetch.done():
            with self._meter.stalling():
                fetch.exception()
        brought = fetch.result()
        self._streams.arrived(slot)
        return brought

    def _fetch(self, stage: Stage, slot: DeviceSlot, op: Op, asked: Sequence[HookCall], version: int) -> Brought:
        """Ask the method in the fetching thread, and copy the weights that it chooses."""
        self._updates.wait(stage.index)
        with self._meter.moving("fetch", stage.index), torch.no_grad(), self._streams.fetching(slot):
            if not asked:
                if slot.content != version:
                    self._copy(stage, slot, version)
                return Brought(version)
            with self.store.opened(stage):
                return self._chosen(stage, slot, op, asked[0], version)

    def _chosen(self, stage: Stage, slot: DeviceSlot, op: Op, asked: HookCall, version: int) -> Brought:
        team, mb, when = asked
        used, flight = None, stage.flights.get(mb)
        if op.kind == "F":
            chosen = self.method.forward_weights(team.weights, team.state, when)
        else:
            used = stage.used(mb) if self._stash else None
            chosen = self.method.backward_weights(team.weights, used, team.state, when)
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
            if self._stash and op.kind == "F":
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
            slot.content = what.lies
        return Brought(what.version)

    def _copy(self, stage: Stage, slot: DeviceSlot, version: int) -> None:
        """Copy the newest weights directly from the store."""
        sent = self.store.read(stage, slot)
        slot.content = version
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
        slot.content = None
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
