"""Executor: does the operations of stages that several ranks compute together, one backward after the other."""

from __future__ import annotations

import torch

from pipeback.runtime.link import WireLink
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
            for s, i in ops:
                if s == 0:
                    self._compare(i)
            return super().forward(ops)

    def backward(self, ops: Ops) -> None:
        with self.group.together():
            super().backward(ops)

    def _compare(self, mb: int) -> None:
        """Raise `OtherBatch` if ranks of the group were given different micro-batches; later workers compare theirs."""
        link = self.link
        assert isinstance(link, WireLink)
        mine = link.marks.pop(mb, 0) if link.last == self.worker.count - 1 else link.marks.get(mb, 0)
        for theirs in self.group.gather(torch.tensor([mine >> 62, mine & _LOW])):
            high, low = theirs.tolist()
            link.compare(mb, mine ^ (high << 62 | low), f"another rank of worker {link.worker}")


_LOW = (1 << 62) - 1  # a mark has more bits than a number of a tensor
