"""Undo: a micro-batch whose forward fails is taken back where no stage has gone on meanwhile, as if it had not come."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.runtime.weight_provider import ResidentWeights
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Order


class Dropped(StageError):
    """The forward of a micro-batch failed. Nothing was trained on it, and the pipeline goes on."""


class Mark:
    """Where all stages stand before a micro-batch comes in."""

    def __init__(self) -> None:
        self._homes: list[Any] = []
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []

    def put(self, worker: Worker, order: Order, more: Any) -> Mark:
        """Here. more: what else is to be known of this moment."""
        self.more, self.order = more, order.state()
        self.worker = worker.start, worker.base, worker.entered
        self.stages = [(s.stream, s.version, s.count, s.options, len(s.flights), s.peak_flights) for s in _in(worker)]
        self._homes = [home for s in _in(worker) for home in s.changing if home[0].get(home[1]) is not None]
        buffers = [owner[key] for owner, key in self._homes]
        if len(buffers) != len(self._buffers) or not all(map(is_, buffers, self._buffers)):
            self._buffers, self._values = buffers, [b.detach().clone() for b in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._values, buffers)
        return self

    @property
    def empty(self) -> bool:
        """Whether nothing was in flight, and no gradient waited for its update."""
        return not any(count or flights for _, _, count, _, flights, _ in self.stages)

    def within_reach(self, worker: Worker) -> bool:
        """Whether no stage has updated its weights since, nor gone backward on what had come before."""
        first, pairs = self.order["arrived"], list(zip(_in(worker), self.stages, strict=True))
        return all(
            stage.version == version
            and (self.empty or (stage.count == count and sum(mb < first for mb in stage.flights) == flights))
            for stage, (_, version, count, _, flights, _) in pairs
        )

    def restore(self, worker: Worker) -> None:
        """Have the stages be as they were."""
        first = self.order["arrived"]
        worker.start, worker.base, worker.entered = self.worker
        for known in (worker.options, worker.sizes, worker.entries):
            for mb in [mb for mb in known if mb >= first]:
                del known[mb]
        box = worker.link.box
        for name in [name for name in box if name[2] >= first]:
            del box[name]
        for stage, (stream, _, count, options, _, peak) in zip(_in(worker), self.stages, strict=True):
            for mb in [mb for mb in stage.flights if mb >= first]:
                del stage.flights[mb]
            if self.empty:
                stage.gradients.take()
            stage.stream, stage.count, stage.options, stage.peak_flights = stream, count, options, peak
        for (owner, key), buffer, then in zip(self._homes, self._buffers, self._values, strict=True):
            owner[key] = buffer
            buffer.data.copy_(then)  # not seen by graphs that saved the buffer


def able(worker: Worker, order: Order) -> bool:
    """Whether all stages are here, no thread computes with them meanwhile, and their forwards leave their weights."""
    return (
        type(worker) is Worker
        and len(worker.stages) == worker.count
        and worker.replicas is None
        and worker.watch is None
        and order.policy == "grouped"
        and isinstance(worker.residence, ResidentWeights)
        and not any(getattr(stage.module, "__rewritten__", ()) for stage in _in(worker))
    )


def _in(worker: Worker) -> Any:
    return worker.stages.values()
