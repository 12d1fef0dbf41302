"""Group: the ranks that compute the same stages together, and the sums and exchanges of tensors between them.

Collectives communicate while operations of a training or an evaluation run (`together`), which every rank of the group
does in the same order. At all other times (while a model is traced, or a stage is rehearsed and timed, which repeats
until a run was undisturbed) they only give tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeback.runtime.replicas import RankReplicas

Wait = Callable[[dist.Work | None], None]

_numbers = count()
_groups: WeakValueDictionary[int, TensorGroup] = WeakValueDictionary()


class TensorRanks(Protocol):
    """What a group asks of the ranks of a pipeline (`distributed.ranks`)."""

    def among(self, device: torch.device | None, what: str) -> tuple[dist.ProcessGroup, Wait]:
        """Return a new process group of the ranks that share this rank's stages, and what waits for its work."""
        ...


class TensorGroup:
    """This rank's view of `count` ranks, of which it is number `index`."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.number = index, count, next(_numbers)
        self.talks = False
        self._sums: RankReplicas | None = None
        self._keeping: tuple[dist.ProcessGroup, Wait] | None = None
        _groups[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self

    def join(self, ranks: TensorRanks, device: torch.device | None) -> None:
        """Make the process groups, once all ranks have met; each of them calls this."""
        group, wait = ranks.among(device, "the tensor-parallel sums")
        self._sums = RankReplicas(group, wait)
        self._keeping = ranks.among(None, "the tensor-parallel state")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context in which collectives communicate."""
        before, self.talks = self.talks, True
        try:
            yield
        finally:
            self.talks = before

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over the ranks, added in their order, so that every rank has the same bits."""
        if not self.talks or self.count == 1:
            return mine.clone()
        assert self._sums is not None
        total = self._sums.start(0, mine.detach().contiguous().flatten())()
        return total.view_as(mine).to(mine.device)

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; all have one shape."""
        if not self.talks or self.count == 1:
            return [mine.clone() for _ in range(self.count)]
        assert self._sums is not None
        return _gathered(mine, self.count, self._sums.group, self._sums.wait)

    def exchange(self, mine: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r, in order, and return the rows from all ranks, `received[r]` from each."""
        if not self.talks or self.count == 1:
            return mine.clone()
        assert self._sums is not None
        rows = mine.detach().contiguous()
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(found, rows, list(received), list(sent), group=self._sums.group, async_op=True)
        self._sums.wait(work)
        return found

    def collect(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor of a state, by rank, in host memory."""
        if self.count == 1:
            return [mine]
        assert self._keeping is not None
        return _gathered(mine.cpu(), self.count, *self._keeping)


_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.13


def _gathered(mine: Tensor, count: int, group: dist.ProcessGroup, wait: Wait) -> list[Tensor]:
    if not mine.numel():
        return [mine.clone() for _ in range(count)]
    run = mine.detach().contiguous().flatten().view(torch.uint8)
    every = run.new_empty(count * run.numel())
    wait(_gather(every, run, group=group, async_op=True))
    return [part.view(mine.dtype).view(mine.shape) for part in every.view(count, -1).unbind()]


def group_of(number: int) -> TensorGroup:
    """The group of this number: graphs keep numbers, so that they can be compared."""
    return _groups[number]
