"""Replicas: several pipelines on different data, whose stages average their gradients at each update.

    g_s = (Σ_r Σ_i g_s,r,i) / (Σ_r Σ_i 1)       r: the replicas; i: their micro-batches since the last update

The sums run in the order of the replicas, so that all runtimes have the same bits for any number of replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeback.runtime.link import Closed, OtherBatch
from pipeback.tensors import accelerators

Wait = Callable[[dist.Work | None], None]
Talking = tuple[dist.ProcessGroup, Wait]  # a group, and what waits for its work


class SummedUpdate(NamedTuple):
    """Whose update a replica sums gradients for, in numbers that float32 adds up exactly; they travel with these.

    given: micro-batches of all pushes up to this one; 0 if that is not known, or need not be the same.
    """

    stage: int
    version: int
    given: int
    replicas: int = 1

    @classmethod
    def of(cls, stage: int, version: int, given: int) -> SummedUpdate:
        return cls(stage, version % 2**16, given % 2**16)

    def check(self, sums: Sequence[float]) -> None:
        """Raise `OtherBatch` if the sums over the replicas say that these are not at the same update."""
        count = sums[-1]
        if count < 2 or any(total != count * mine for total, mine in zip(sums, self, strict=True)):
            given = f"was given {self.given} micro-batches and " if self.given else ""
            raise uneven(f"{given}is at update {self.version + 1}")


def uneven(what: str) -> OtherBatch:
    """The error for replicas that were not given the same. what: what this one was given, or does."""
    return OtherBatch(
        f"one replica {what}, and others differ; every replica must push the same number of micro-batches each time"
    )


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
    not answer. groups: a group of its own, with its wait, for each stage that has one. Gloo ends the process if vectors
    of different length meet, as those of different stages would if ranks were not at the same update.
    """

    def __init__(self, group: dist.ProcessGroup, wait: Wait, groups: Mapping[int, Talking] | None = None) -> None:
        self.group, self.wait, self.count, self.groups = group, wait, group.size(), groups or {}

    def start(self, stage: int, mine: Tensor) -> Callable[[], Tensor]:
        if accelerators.away(mine.device) and not accelerators.direct(mine.device):
            mine = mine.cpu()  # gloo sums in host memory
        group, wait = self.groups.get(stage, (self.group, self.wait))
        share = -(-mine.numel() // self.count)
        padded = torch.nn.functional.pad(mine, (0, share * self.count - mine.numel()))
        theirs = torch.empty_like(padded)
        work = dist.all_to_all_single(theirs, padded, group=group, async_op=True)

        def finish() -> Tensor:
            wait(work)
            total = in_order(list(theirs.view(self.count, share).unbind()))
            whole = torch.empty_like(padded)
            wait(dist.all_gather_into_tensor(whole, total, group=group, async_op=True))
            return whole[: mine.numel()]

        return finish


def in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum of the parts, added from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
