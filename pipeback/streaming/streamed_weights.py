"""Streamed weights: the residence of weights that come to the device for an operation and live in a store.

    fetching  one thread    W1 ──── W2 ──── W3 ────             copies weights to the device, one stage ahead
    computing               F0 │ F1 │ F2 │ B2 │ B1 │ B0         on whatever stage the order names
    updating  one thread                      U2 ── U1 ── U0    on the weights in the store, by the gradients that left

A stage's next fetch waits for its update, nobody else does. At most `prefetch + 1` stages are on the device.

Where a stage's weights are split over the stores of several ranks (`shards`), a fetch gathers them, and an update
begins with the sums of gradients going to the owners. Both threads then wait for other ranks, so what they do, and in
which order, must follow from the operations alone: hence nothing stays on the device from one run of them to the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.methods.base import Method, Past, Shift, overrides
from pipeback.runtime.weight_provider import Ask, HookCall, forget_casts
from pipeback.schedules.ops import Kind, Op
from pipeback.schedules.order import Ops, Wave
from pipeback.stages.device_slot import DeviceSlot, Pool
from pipeback.stages.gradients import GradientSums
from pipeback.stages.stage import Stage
from pipeback.streaming.cuda_copies import CudaCopies
from pipeback.streaming.shards import ReplicaGroup
from pipeback.streaming.sparse_index import scatter, unpack
from pipeback.streaming.store import Store, lay
from pipeback.streaming.traffic import Traffic
from pipeback.tensors.weight_list import Weights, add_scaled


class Brought(NamedTuple):
    """What an operation finds on the device."""

    version: int  # that the operation counts as run on: shifted weights are of the newest one
    owned: Weights | None = None  # shifted weights that B will need again


class StreamedWeights:
    """Brings what the operations of a worker's stages run on; at most store.prefetch + 1 stages are on the device."""

    joins = False

    def __init__(
        self, stages: Mapping[int, Stage], method: Method, store: Store, column: ReplicaGroup | None = None
    ) -> None:
        """column: the ranks over whose stores the weights are split."""
        self.stages, self.method, self.store, self.column = stages, method, store, column
        self.ask: Ask = lambda kind, ops: []
        self.pool = Pool(store.prefetch + 1)
        self._stash = method.copies == "stash"
        self._hooks = {
            "F": overrides(method, "forward_weights"),
            "B": overrides(method, "backward_weights") or self._stash,
        }
        self._fetching = ThreadPoolExecutor(1, "pipeback fetching")
        self._updating = ThreadPoolExecutor(1, "pipeback updating")
        self._fetches: dict[int, tuple[Op | None, Future[Brought]]] = {}  # under way, by stage
        self._updates: dict[int, Future[None]] = {}  # the last of each stage
        self._needed: set[DeviceSlot] = set()  # by the operation at hand and those that come
        self._streams = CudaCopies(stages.values())
        self._traffic, self._lock = Traffic(), threading.Lock()
        self.moves: list[tuple[float, float, str, int]] = []
        self._recording = False

    # -- looking ahead -------------------------------------------------------------------------------------------

    def ahead(self, waves: Iterable[Wave]) -> Iterator[Wave]:
        """The same operations one by one; meanwhile what the next stages run on is fetched."""
        begin = time.perf_counter()
        source, queue, visits = _singles(waves), deque[Wave](), deque[tuple[int, Kind, int]]()
        at, more, pulled = -1, True, -1
        try:
            while True:
                while more and (len(visits) <= self.store.prefetch or not queue):
                    wave = next(source, None)
                    if wave is None:
                        more = False
                        break
                    queue.append(wave)
                    (s, i) = wave.ops[0]
                    if s in self.stages and s != pulled and self._slot(s).nbytes:
                        pulled = s
                        visits.append((s, wave.kind, i))
                if not queue:
                    if self.column is not None:
                        self._vacate()  # whether somebody calls `rest` now must not change what is fetched next
                    return
                wave = queue.popleft()
                s = wave.ops[0][0]
                if s in self.stages and s != at and self._slot(s).nbytes:
                    at = s
                    visits.popleft()
                    self._plan([(s, wave.kind, wave.ops[0][1]), *visits])
                yield wave
        finally:
            self._count(seconds=time.perf_counter() - begin)

    def _plan(self, visits: Iterable[tuple[int, Kind, int]]) -> None:
        """A stage is at work from here on, and others come: what they need is fetched, as many as there is room for."""
        chosen: dict[int, Op] = {}  # a stage's first visit: after it, it may need something else
        for t, kind, i in visits:
            if len(chosen) <= self.store.prefetch:
                chosen.setdefault(t, Op(kind, i))
        self._needed = {self._slot(t) for t in chosen}
        for t, op in chosen.items():
            # what a method with `needs_entry` is asked for may not be known before its turn comes
            if op.kind != "U" and not (self._hooks[op.kind] and self.method.needs_entry):
                self._begin(t, op)

    # -- operations ----------------------------------------------------------------------------------------------

    def forward(self, ops: Ops) -> list[Brought]:
        """Bring what this forward runs on."""
        ((s, i),) = ops
        return [self._bring(s, Op("F", i))]

    def after_forward(self, held: Sequence[Brought], ops: Ops) -> None:
        """The flight remembers what it ran on."""
        ((s, i),) = ops
        flight = self.stages[s].flights.get(i)
        if flight is not None:  # else its forward has failed
            flight.version, flight.owned = held[0].version, held[0].owned
            if flight.owned is not None:
                self.stages[s].owns = True
                self.store.put(self.stages[s])
        forget_casts()

    def backward(self, ops: Ops) -> tuple[list[Brought], dict[int, int]]:
        """Bring what this backward runs on, and the sums of gradients that it adds to."""
        ((s, i),) = ops
        brought = self._bring(s, Op("B", i))
        self._return_sums(self.stages[s])
        return [brought], {s: brought.version}

    def after_backward(self, held: Sequence[Brought]) -> None:
        """What was brought lies there until its room is needed."""

    def collect(self, stage: Stage) -> None:
        """Sums of gradients that left the device are there again."""
        self._return_sums(stage)

    def update(self, stages: Sequence[Stage], make: Callable[[Sequence[GradientSums]], None]) -> None:
        """The gradients leave for the store, which makes the update while other stages compute."""
        (stage,) = stages
        self._check()
        self._return_sums(stage, to_device=False)
        sums = stage.sums()
        job = self._owners_job(stage, sums, make) if stage.shard is not None else self._job(stage, sums, make)
        while len(pending := [update for update in self._updates.values() if not update.done()]) > self.store.prefetch:
            with self._stalling():
                pending[0].result()
        self._updates[stage.index] = self._updating.submit(job)

    def _job(
        self, stage: Stage, sums: GradientSums, make: Callable[[Sequence[GradientSums]], None]
    ) -> Callable[[], None]:
        sparse, number = stage.sparse, stage.version + 1
        grads, left = self._streams.leave(self._surviving(stage, sums.grads))
        self._count(gradients_out=_bytes(grads))

        def job() -> None:
            with left(), self._moving("store", stage), torch.no_grad(), self.store.opened(stage, changes=True):
                mine = grads if sparse is None or not sparse.policy.dense_gradient(number) else sparse.gathered(grads)
                make([GradientSums(mine, sums.number)])
                if sparse is not None and sparse.policy.due(number):
                    sparse.change(stage, grads, number)

        return job

    def _owners_job(
        self, stage: Stage, sums: GradientSums, make: Callable[[Sequence[GradientSums]], None]
    ) -> Callable[[], None]:
        """The sums go to their owners first: from device to device, or from host to host."""
        assert stage.shard is not None and self.column is not None
        scatter, version = stage.shard.scatter, stage.version
        if self.column.updating.nccl:
            grads, leave = sums.grads, self._streams.handed(sums.grads)
        else:
            (grads, left), leave = self._streams.leave(sums.grads), None
            self._count(gradients_out=_bytes(grads))

        def job() -> None:
            if leave is None:
                with left():
                    mine, total, sent = scatter(grads, sums.number, version)
            else:
                mine, total, sent = leave(lambda: scatter(grads, sums.number, version))
                self._count(gradients_out=_bytes(mine))
            self._count(scattered=sent)
            with self._moving("store", stage), torch.no_grad(), self.store.opened(stage, changes=True):
                make([GradientSums(mine, total)])

        return job

    def ready(self, kind: Kind, stage: int, mb: int) -> None:
        """Wait until what an operation runs on is on the device."""
        if kind != "U" and self._slot(stage).nbytes:
            self._begin(stage, Op(kind, mb))
            with self._stalling():
                self._fetches[stage][1].exception()

    def record(self, on: bool) -> None:
        """Measure what the threads do from now on."""
        if on:
            self.moves = []
        self._recording = on

    @contextmanager
    def newest(self, stage: Stage) -> Iterator[None]:
        """The time in which `stage.weights` are the newest, and can be read."""
        update = self._updates.get(stage.index)
        if update is not None:
            with self._stalling():
                update.result()
        with self.store.opened(stage):
            yield

    def rest(self) -> None:
        """Nothing is under way and nothing on the device: all weights are in the store; raises what has failed."""
        begin = time.perf_counter()
        with self._stalling():
            for update in self._updates.values():
                update.result()
        self._updates.clear()
        self._vacate()
        self._count(seconds=time.perf_counter() - begin)

    def _vacate(self) -> None:
        """Let all stages go from the device."""
        self._needed = set()
        while self.pool.slots:
            self._dismiss(self.pool.slots[0])

    def close(self) -> None:
        """Stop the threads, and let all stages go from the device, whatever has happened."""
        self._fetching.shutdown(cancel_futures=True)
        self._updating.shutdown(cancel_futures=True)
        for slot in list(self.pool.slots):
            self.pool.dismiss(slot)

    @property
    def traffic(self) -> Traffic:
        """Since the beginning."""
        pool = self.pool
        return self._traffic._replace(peak_stages=pool.peak_stages, peak_bytes=pool.peak_bytes)

    # -- fetching ------------------------------------------------------------------------------------------------

    def _bring(self, s: int, op: Op) -> Brought:
        """What this operation runs on, on the device now."""
        slot = self._slot(s)
        if not slot.nbytes:  # a stage without parameters
            return Brought(self.stages[s].version)
        if slot not in self._needed:
            self._needed = {slot}
        self._begin(s, op)
        fetch = self._fetches.pop(s)[1]
        if not fetch.done():
            with self._stalling():
                fetch.exception()
        brought = fetch.result()
        self._streams.arrived(slot)
        return brought

    def _begin(self, s: int, op: Op) -> None:
        """Have the fetching thread bring what the operation runs on, unless it is there or on its way."""
        stage, slot = self.stages[s], self._slot(s)
        self._check()
        asks = self._hooks[op.kind]
        key = op if asks else None  # without a hook, all operations run on the newest weights
        under_way = self._fetches.get(s)
        if under_way is not None and under_way[0] == key:
            return
        if under_way is not None:
            under_way[1].exception()
        version = stage.version
        if not asks and slot.content == version:
            done: Future[Brought] = Future()
            done.set_result(Brought(version))
            self._fetches[s] = key, done
            return
        asked = self.ask(op.kind, [(s, op.mb)]) if asks else []
        self._admit(slot)
        self._streams.given(slot)
        self._fetches[s] = key, self._fetching.submit(self._fetch, stage, slot, op, asked, version)

    def _fetch(self, stage: Stage, slot: DeviceSlot, op: Op, asked: Sequence[HookCall], version: int) -> Brought:
        """In the fetching thread: ask the method, and copy what it chooses."""
        update = self._updates.get(stage.index)
        if update is not None:
            update.result()
        with self._moving("fetch", stage), torch.no_grad(), self._streams.fetching(slot):
            if not asked:
                if slot.content != version:
                    self._copy(stage, slot, version)
                return Brought(version)
            with self.store.opened(stage):
                return self._chosen(stage, slot, op, asked[0], version)

    def _chosen(self, stage: Stage, slot: DeviceSlot, op: Op, asked: HookCall, version: int) -> Brought:
        team, mb, when = asked
        if op.kind == "F":
            chosen = self.method.forward_weights(team.weights, team.state, when)
        else:
            used, flight = stage.used(mb) if self._stash else None, stage.flights[mb]
            chosen = self.method.backward_weights(team.weights, used, team.state, when)
            if chosen is used and flight.owned is not None:
                with self.store.lent(stage, flight.owned):
                    self._place(stage, slot, flight.owned, flight.version)
                return Brought(flight.version)
            if chosen is used:
                chosen = Past(flight.version)
        if chosen is team.weights:
            chosen = Past(version)
        if isinstance(chosen, Past):
            if slot.content != chosen.version and chosen.version == version:
                self._copy(stage, slot, version)
            elif slot.content != chosen.version:
                older = stage.past(chosen.version)
                with self.store.lent(stage, older):
                    self._place(stage, slot, older, chosen.version)
                slot.content = chosen.version
            return Brought(chosen.version)
        self._place(stage, slot, chosen, version)
        if not (self._stash and op.kind == "F"):
            return Brought(version)
        owned = [torch.empty_like(w) for w in stage.weights]
        torch._foreach_copy_(owned, list(stage.weights))
        _shift(owned, chosen)
        return Brought(version, owned)

    def _copy(self, stage: Stage, slot: DeviceSlot, version: int) -> None:
        """The newest weights, straight from the store."""
        sent = self.store.read(stage, slot)
        slot.content = version
        self._count(weights_in=sent, fetches=1, gathered=_others(stage))

    def _place(self, stage: Stage, slot: DeviceSlot, chosen: Weights | Shift, version: int) -> None:
        """Weights that are in host memory, shifted there or on the way."""
        if isinstance(chosen, Shift) and slot.device.type == "cpu" and stage.sparse is None and stage.shard is None:
            sent = lay(stage, slot, stage.weights, version)
            _shift(stage.live(), chosen)
        elif isinstance(chosen, Shift):
            shifted = [w.detach().clone() for w in stage.weights]
            _shift(shifted, chosen)
            sent = lay(stage, slot, shifted, version)
        else:
            sent = lay(stage, slot, chosen, version)
        slot.content = None
        self._count(weights_in=sent, fetches=1, gathered=_others(stage))

    def _surviving(self, stage: Stage, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What is to leave of a gradient: that of the survivors, unless other ones are chosen by the rest."""
        if stage.sparse is None or stage.sparse.policy.dense_gradient(stage.version + 1):
            return grads
        return stage.sparse.gathered(grads)

    # -- room ----------------------------------------------------------------------------------------------------

    def _slot(self, s: int) -> DeviceSlot:
        slot = self.stages[s].slot
        assert slot is not None
        return slot

    def _admit(self, slot: DeviceSlot) -> None:
        pool = self.pool
        if slot in pool.slots:
            return
        while len(pool.slots) >= pool.most:
            self._dismiss(next(other for other in pool.slots if other not in self._needed))
        pool.admit(slot)

    def _dismiss(self, slot: DeviceSlot) -> None:
        """Let a stage go from the device, and with it the sums of its gradients."""
        s = next(stage.index for stage in self.stages.values() if stage.slot is slot)
        under_way = self._fetches.pop(s, None)
        if under_way is not None:
            under_way[1].exception()
            self._streams.arrived(slot)
        stage = self.stages[s]
        if stage.count and stage.spilled is None and any(g is not None for g in stage.gradients.values):
            sums, left = self._streams.leave(self._surviving(stage, stage.gradients.take()))
            # where they stay they are autograd's own, and may be the gradient that was sent upstream
            with left():
                stage.spilled = [g if g is None or g.is_pinned() else g.clone() for g in sums]
            self._count(gradients_out=_bytes(sums))
            self.store.put(stage)
        self.pool.dismiss(slot)

    def _return_sums(self, stage: Stage, *, to_device: bool = True) -> None:
        """Sums that left with the stage's weights are where B adds to them, or U takes them."""
        if stage.spilled is None:
            return
        with self.store.lent(stage, stage.spilled):
            sums, stage.spilled = stage.spilled, None
        slot = self._slot(stage.index)
        if to_device:
            self._count(sums_in=_bytes(sums))
        sums = [g if g is None or not to_device else g.to(slot.device) for g in sums]
        indices = [None] * len(sums) if stage.sparse is None else stage.sparse.packed
        for n, (p, g, index) in enumerate(zip(stage.params, sums, indices, strict=True)):
            if index is not None and g is not None and g.shape != p.shape:
                sums[n] = scatter(g, unpack(index.to(g.device)), torch.empty_like(p, device=g.device))
        stage.gradients.put(sums)

    # -- counting ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise what an update in the store has failed with."""
        for s, update in list(self._updates.items()):
            if update.done():
                update.result()
                del self._updates[s]

    @contextmanager
    def _moving(self, kind: str, stage: Stage) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._recording:
            self.moves.append((begin, time.perf_counter(), kind, stage.index))

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with nullcontext() if self.column is None else self.column.stalled("the store"):
                yield
        finally:
            self._count(stall=time.perf_counter() - begin)

    def _count(self, **more: float) -> None:
        with self._lock:
            old = self._traffic
            self._traffic = old._replace(**{name: getattr(old, name) + value for name, value in more.items()})


def _singles(waves: Iterable[Wave]) -> Iterator[Wave]:
    for kind, ops in waves:
        for op in ops:
            yield Wave(kind, [op])


def _shift(weights: Weights, chosen: Weights | Shift) -> None:
    """w ← what was chosen; `weights` are the newest ones."""
    if isinstance(chosen, Shift):
        add_scaled(weights, chosen.coefficients, chosen.directions)
    else:
        torch._foreach_copy_(weights, list(chosen))


def _others(stage: Stage) -> int:
    """Bytes of a stage's weights that other ranks' stores have."""
    return 0 if stage.shard is None else stage.shard.nbytes - stage.shard.share


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
