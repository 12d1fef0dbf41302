"""Store updates: takes gradients off the device; one thread steps the optimizers in the store in the order of updates.

Incomplete gradient sums leave the device with their stage, and come back for its next backward (B) or update (U).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from pipeback.stages.gradients import GradientSums
from pipeback.stages.stage import Stage
from pipeback.streaming.cuda_copies import CudaCopies
from pipeback.streaming.job_thread import JobThread
from pipeback.streaming.shards import ReplicaGroup
from pipeback.streaming.sparse_index import scatter, unpack
from pipeback.streaming.store import Store
from pipeback.streaming.traffic import Meter
from pipeback.tensors.weight_list import Weights

Make = Callable[[Sequence[GradientSums]], None]


class StoreUpdates:
    """The updates of a worker's streamed stages; `wait`, `check` and `rest` raise the error of one that failed."""

    def __init__(self, store: Store, column: ReplicaGroup | None, streams: CudaCopies, meter: Meter) -> None:
        """column: the group of ranks over whose stores the weights are split; None: they are not split."""
        self.store, self.column = store, column
        self._streams, self._meter = streams, meter
        self._thread = JobThread("pipeback updating")
        self._updates: dict[int, Future[None]] = {}  # the last update of each stage

    # -- updates -------------------------------------------------------------------------------------------------

    def begin(self, stages: Sequence[Stage], make: Make) -> None:
        """Send the gradients of stages of a unit to the store; wait while more than `prefetch` updates are running."""
        self.check()
        for stage in stages:
            self.collect(stage, to_device=False)
        sums = [stage.gradients.sums() for stage in stages]
        for stage in stages:
            if stage.versions.hands and stage.weights:
                make = self._lending(stage, stage.versions.handed(stage.version, stage.weights), make)
        shared = stages[0].home.share is not None
        job = self._owners_job(stages, sums, make) if shared else self._job(stages, sums, make)
        while len(pending := {id(u): u for u in self._updates.values() if not u.done()}) > self.store.prefetch:
            with self._meter.stalling():
                next(iter(pending.values())).result()
        done = self._thread.submit(job)
        for stage in stages:
            self._updates[stage.index] = done

    def _lending(self, stage: Stage, handed: Weights, make: Make) -> Make:
        """Return `make` with the weights in memory that it is handed."""

        def lent(sums: Sequence[GradientSums]) -> None:
            with self.store.lent(stage, handed):
                make(sums)

        return lent

    def _job(self, stages: Sequence[Stage], sums: Sequence[GradientSums], make: Make) -> Callable[[], None]:
        first, number = stages[0], stages[0].version + 1
        sparse = first.home.sparse
        leaving = [g for stage, each in zip(stages, sums, strict=True) for g in _surviving(stage, each.grads)]
        grads, left = self._streams.leave(leaving, len(stages))
        self._meter.add(gradients_out=_bytes(grads))

        def job() -> None:
            with left(), self._meter.moving("store", first.index), torch.no_grad(), self._opened(stages):
                mine = grads if sparse is None or not sparse.policy.dense_gradient(number) else sparse.gathered(grads)
                each = len(mine) // len(stages)
                parts = [mine[n * each : (n + 1) * each] for n in range(len(stages))]
                make([GradientSums(part, of.number) for part, of in zip(parts, sums, strict=True)])
                if sparse is not None and sparse.policy.due(number):
                    sparse.change(first, grads, number)

        return job

    def _owners_job(self, stages: Sequence[Stage], sums: Sequence[GradientSums], make: Make) -> Callable[[], None]:
        """Return an update that first sends the sums to their owners, from device to device or from host to host."""
        sending = [self._sending(stage, each) for stage, each in zip(stages, sums, strict=True)]

        def job() -> None:
            mine = [send() for send in sending]
            with self._meter.moving("store", stages[0].index), torch.no_grad(), self._opened(stages):
                make(mine)

        return job

    def _sending(self, stage: Stage, sums: GradientSums) -> Callable[[], GradientSums]:
        """Return what sends a stage's sums to their owners, and returns those of this rank."""
        assert stage.home.share is not None and self.column is not None
        scatter, version = stage.home.share.scatter, stage.version
        if self.column.updating.nccl:
            grads, leave = sums.grads, self._streams.handed(sums.grads)
        else:
            (grads, left), leave = self._streams.leave(sums.grads), None
            self._meter.add(gradients_out=_bytes(grads))

        def send() -> GradientSums:
            if leave is None:
                with left():
                    mine, total, sent = scatter(grads, sums.number, version)
            else:
                mine, total, sent = leave(lambda: scatter(grads, sums.number, version))
                self._meter.add(gradients_out=_bytes(mine))
            self._meter.add(scattered=sent)
            return GradientSums(mine, total)

        return send

    @contextmanager
    def _opened(self, stages: Sequence[Stage]) -> Iterator[None]:
        """A context in which these stages are in memory, to be changed."""
        with ExitStack() as opened:
            for stage in stages:
                opened.enter_context(self.store.opened(stage, changes=True))
            yield

    def wait(self, stage: int, *, stalls: bool = False) -> None:
        """Wait until the last update of a stage is done. stalls: whether computing waits for it."""
        update = self._updates.get(stage)
        if update is not None:
            with self._meter.stalling() if stalls else nullcontext():
                update.result()

    def check(self) -> None:
        """Forget the updates that are done."""
        for s, update in list(self._updates.items()):
            if update.done():
                update.result()
                del self._updates[s]

    def rest(self) -> None:
        """Wait until all updates are done."""
        with self._meter.stalling():
            for update in self._updates.values():
                update.result()
        self._updates.clear()

    def close(self) -> None:
        """Stop the thread; updates that have not begun are dropped."""
        self._thread.close()

    # -- incomplete sums -------------------------------------------------------------------------------------------

    def spill(self, stage: Stage) -> None:
        """Take the gradient sums of a stage off the device, which its weights leave."""
        if stage.gradients.count and stage.home.spilled is None and any(g is not None for g in stage.gradients.values):
            sums, left = self._streams.leave(_surviving(stage, stage.gradients.take()))
            # if they stay, they are autograd's tensors, and may be the gradient that was sent upstream
            with left():
                stage.home.spill([g if g is None or g.is_pinned() else g.clone() for g in sums])
            self._meter.add(gradients_out=_bytes(sums))
            self.store.put(stage)

    def collect(self, stage: Stage, *, to_device: bool = True) -> None:
        """Bring back sums that left with the stage's weights, to which B adds or which U uses."""
        if stage.home.spilled is None:
            return
        with self.store.lent(stage, stage.home.spilled):
            sums = stage.home.bring_sums()
        assert stage.home.slot is not None
        device = stage.home.slot.device
        if to_device:
            self._meter.add(sums_in=_bytes(sums))
        sums = [g if g is None or not to_device else g.to(device) for g in sums]
        indices = [None] * len(sums) if stage.home.sparse is None else stage.home.sparse.packed
        for n, (p, g, index) in enumerate(zip(stage.params, sums, indices, strict=True)):
            if index is not None and g is not None and g.shape != p.shape:
                sums[n] = scatter(g, unpack(index.to(g.device)), torch.empty_like(p, device=g.device))
        stage.gradients.put(sums)


def _surviving(stage: Stage, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the gradients that are to leave: those of the survivors, or whole ones if they choose the survivors."""
    if stage.home.sparse is None or stage.home.sparse.policy.dense_gradient(stage.version + 1):
        return grads
    return stage.home.sparse.gathered(grads)


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
