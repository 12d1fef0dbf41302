"""Undo: takes a micro-batch back whose forward fails, as if it had not come, unless a stage has gone on meanwhile."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Order
from pipeback.tensors.layout import put_back


class Dropped(StageError):
    """The forward of a micro-batch failed. Nothing was trained on it, and the pipeline goes on."""


_STANDS = attrgetter(
    "random.state", "version", "gradients.count", "options", "peak_flights", "flights", "gradients.split.waiting",
    "learnt.changing",
)  # fmt: skip


class Mark:
    """The state of all stages before a micro-batch enters, to which they can be put back."""

    def __init__(self) -> None:
        self._homes: list[Any] = []
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    def put(self, worker: Worker, order: Order, more: Any) -> Mark:
        """Remember the present state. more: anything else to remember with it."""
        self.more, self.order = more, order.state()
        self.worker = worker.start, worker.base, worker.entered
        columns = list(zip(*map(_STANDS, _in(worker)), strict=True))
        self.stages = columns[:5]  # of each attribute, the values of all stages
        self.flights = list(map(len, columns[5]))
        self.waiting = any(map(len, columns[6]))  # between I and W
        self._homes = [at for some in filter(None, columns[7]) for at in some if at[0].get(at[1]) is not None]
        buffers = [owner[key] for owner, key in self._homes]
        same = len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers))
        if not same or any(b.shape != v.shape for b, v in zip(buffers, self._values, strict=True)):
            self._buffers, self._values = buffers, [b.detach().clone() for b in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._values, buffers)
        return self

    @property
    def empty(self) -> bool:
        """Whether nothing was in flight, and no gradient waited for its update."""
        return not any(self.flights) and not self.waiting and not any(self.stages[2])

    def within_reach(self, worker: Worker) -> bool:
        """Whether no stage has, since the mark, updated its weights or run the backward of an earlier micro-batch."""
        _, versions, counts, *_ = self.stages
        first, every = self.order["arrived"], zip(_in(worker), versions, counts, self.flights, strict=True)
        return all(
            stage.version == version
            and (self.empty or (stage.gradients.count == count and sum(mb < first for mb in stage.flights) == flights))
            for stage, version, count, flights in every
        )

    def restore(self, worker: Worker) -> None:
        """Restore the state that the stages had at the mark."""
        worker.residence.rest()  # what was fetched for micro-batches that have not come
        first = self.order["arrived"]
        worker.start, worker.base, worker.entered = self.worker
        forget(worker, first)
        for stage, stream, _, count, options, peak in zip(_in(worker), *self.stages, strict=True):
            if self.empty:
                stage.gradients.take()
                stage.home.bring_sums()
            stage.go_back(first, stream, count, options, peak)
            if not count:  # no micro-batch has gone backward since the last update
                stage.versions.hand_over(None)
        for (owner, key), buffer, then in zip(self._homes, self._buffers, self._values, strict=True):
            owner[key] = buffer
            put_back(buffer, then)


def forget(worker: Worker, first: int) -> None:
    """Forget what the worker holds of the micro-batches from `first` on, apart from its stages."""
    worker.ledger.forget(first)
    for known in (worker.options, worker.sizes, worker.entries):
        for mb in [mb for mb in known if mb >= first]:
            del known[mb]
    if worker.executor.joined is not None:
        worker.executor.joined.forget(first)
    box = worker.link.box
    for name in [name for name in box if name[2] >= first]:
        del box[name]


def entering(worker: Worker, order: Order) -> bool:
    """Whether a forward that fails at the first stage is the first of its tick, and leaves the stage as it was."""
    return (
        order.policy == "skewed"
        and len(worker.stages) == worker.count
        and worker.replicas is None
        and worker.watch is None
        and worker.residence.joins
        and worker.stages[0].stack is None
        and not worker.stages[0].learnt.changing
        and not vars(worker.stages[0].module).get("__rewritten__")
    )


def able(worker: Worker, order: Order) -> bool:
    """Whether all stages are here, no other thread or rank uses them, and no forward writes into their weights."""
    return (
        worker.executor.undoes
        and len(worker.stages) == worker.count
        and worker.replicas is None
        and worker.watch is None
        and worker.residence.alone
        and order.policy == ("grouped" if worker.residence.joins else "streaming")
        and not any(vars(stage.module).get("__rewritten__") for stage in _in(worker))
    )


def _in(worker: Worker) -> Any:
    return worker.stages.values()
