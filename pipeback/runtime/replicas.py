"""Replicas: several pipelines on different data, whose stages average their gradients at each update.

    g_s = (Σ_r Σ_i g_s,r,i) / (Σ_r Σ_i 1)       r: the replicas; i: their micro-batches since the last update

The sums run in the order of the replicas, so that all runtimes have the same bits for any number of replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeback.runtime.link import Closed
from pipeback.tensors import accelerators


class Replicas(Protocol):
    """Sums vectors of one worker's stages over the replicas."""

    def start(self, stage: int, mine: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a vector over the replicas, which call this in the same order; return a function that waits."""
        ...


class ThreadReplicas:
    """Replicas that are threads of one process."""

    def __init__(self, count: int, closed: threading.Event) -> None:
        self.count, self.closed = count, closed
        self.rounds: list[dict[int, int]] = [{} for _ in range(count)]
        self.parts: dict[tuple[int, int], list[Tensor | None]] = {}
        self.taken: dict[tuple[int, int], int] = {}
        self.changed = threading.Condition()

    def start(self, replica: int, stage: int, mine: Tensor) -> Callable[[], Tensor]:
        turn = self.rounds[replica].get(stage, 0)
        self.rounds[replica][stage] = turn + 1
        key = stage, turn
        with self.changed:
            self.parts.setdefault(key, [None] * self.count)[replica] = mine
            self.changed.notify_all()
        return lambda: self._sum(key)

    def _sum(self, key: tuple[int, int]) -> Tensor:
        with self.changed:
            while any(part is None for part in self.parts[key]):
                if self.closed.is_set():
                    raise Closed
                self.changed.wait(timeout=0.2)
            parts = [part for part in self.parts[key] if part is not None]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == self.count:
                del self.parts[key], self.taken[key]
        return in_order(parts)


class OneReplica:
    """The view that one replica has of `ThreadReplicas`."""

    def __init__(self, all_of_them: ThreadReplicas, replica: int) -> None:
        self.all, self.replica = all_of_them, replica

    def start(self, stage: int, mine: Tensor) -> Callable[[], Tensor]:
        return self.all.start(self.replica, stage, mine)


class RankReplicas:
    """Replicas that are ranks of a process group, which hold the same stages.

    Every rank sums a share of the vector in rank order, then all exchange the shares: as many bytes as a ring, and
    bits that do not depend on the group's own algorithm.

    wait: takes the group's pending work and returns when it is done, or raises an error that names the rank that does
    not answer.
    """

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work | None], None]) -> None:
        self.group, self.wait, self.count = group, wait, group.size()

    def start(self, stage: int, mine: Tensor) -> Callable[[], Tensor]:
        if accelerators.away(mine.device) and not accelerators.direct(mine.device):
            mine = mine.cpu()  # gloo sums in host memory
        share = -(-mine.numel() // self.count)
        padded = torch.nn.functional.pad(mine, (0, share * self.count - mine.numel()))
        theirs = torch.empty_like(padded)
        work = dist.all_to_all_single(theirs, padded, group=self.group, async_op=True)

        def finish() -> Tensor:
            self.wait(work)
            total = in_order(list(theirs.view(self.count, share).unbind()))
            whole = torch.empty_like(padded)
            self.wait(dist.all_gather_into_tensor(whole, total, group=self.group, async_op=True))
            return whole[: mine.numel()]

        return finish


def in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum of the parts, added from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
