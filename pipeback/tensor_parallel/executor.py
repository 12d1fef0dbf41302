"""Executor: does the operations of stages that several ranks compute together, one backward after the other."""

from __future__ import annotations

import torch

from pipeback.runtime.executor import JoinedOperations, SplitOperations
from pipeback.runtime.link import WireLink
from pipeback.runtime.one_by_one import OneByOne
from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.stages.flight import Flight
from pipeback.tensor_parallel.group import TensorGroup


class TensorExecutor(OneByOne):
    """The executor of a worker of which `group` has one rank per shard; all do the same operations in one order."""

    apart = True  # backwards one by one, in the order in which the other ranks do them
    split: SplitOperations | None = None
    joined: JoinedOperations | None = None
    whole = "several ranks compute it together"  # and both parts of a backward would exchange tensors
    undoes = False  # another rank of the group may have gone on

    def __init__(self, worker: Worker, group: TensorGroup) -> None:
        self.worker, self.link, self.group = worker, worker.link, group
        self._one_by_one = StageExecutor(worker)

    def forward(self, ops: Ops) -> list[Flight]:
        """Do F of each (stage, micro-batch), in the order given; return the new flights."""
        with self.group.together():
            for s, i in ops:
                if s == 0:
                    self._compare(i)
            return self._one_by_one.forward(ops)

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch)."""
        with self.group.together():
            self._one_by_one.backward(ops)

    def _compare(self, mb: int) -> None:
        """Raise `OtherBatch` if ranks of the group were given different micro-batches; later workers compare theirs."""
        link = self.link
        assert isinstance(link, WireLink)
        alone = len(set(link.owner)) == 1  # otherwise a mark is needed until the last forward here
        mine = link.marks.pop(mb, 0) if alone else link.marks.get(mb, 0)
        for theirs in self.group.gather(torch.tensor([mine >> 62, mine & _LOW], device="cpu")):
            high, low = theirs.tolist()
            link.compare(mb, mine ^ (high << 62 | low), f"another rank of worker {link.worker}")


_LOW = (1 << 62) - 1  # a mark has more bits than a number of a tensor
