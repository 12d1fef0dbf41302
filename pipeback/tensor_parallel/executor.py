"""Executor: does the operations of stages that several ranks compute together, one backward after the other."""

from __future__ import annotations

from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.stages.flight import Flight
from pipeback.tensor_parallel.group import TensorGroup


class TensorExecutor(StageExecutor):
    """The executor of a worker of which `group` has one rank per shard; all do the same operations in one order."""

    undoes = False  # another rank of the group may have gone on

    def __init__(self, worker: Worker, group: TensorGroup) -> None:
        super().__init__(worker)
        self.group, self.apart = group, True

    def forward(self, ops: Ops) -> list[Flight]:
        with self.group.together():
            return super().forward(ops)

    def backward(self, ops: Ops) -> None:
        with self.group.together():
            super().backward(ops)
