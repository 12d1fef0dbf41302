"""Commits: say when a disk store commits, commit on all ranks together, and resume a pipeline from a commit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeback.checkpoint import pipeline_state
from pipeback.counts import counted
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.errors import StoreError
from pipeback.methods.base import Method
from pipeback.runtime.loop import Loop
from pipeback.schedules.programs import flush
from pipeback.stages.stage import Stage
from pipeback.streaming import disk_store
from pipeback.streaming.committed import processes
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import Store


class Commits:
    """Decides when a version of a disk store is due.

    It is due at each flush of methods that flush, and else every `DiskStore.commit_every` micro-batches, and when all
    are drained.
    """

    def __init__(self, method: Method, store: Store | None) -> None:
        self._method, self._store = method, store if isinstance(store, DiskStore) else None
        self._flush = 1 if method.flush_each_push else flush(method.schedule)  # micro-batches
        self._made: float = 0  # micro-batches that had arrived at the last commit
        self._began = 0  # micro-batches that had arrived when the schedule last began anew

    def due(self, arrived: int, *, drained: bool = False) -> bool:
        """Whether a version is due once `arrived` micro-batches have come; all ranks and threads agree on it."""
        if self._store is None:
            return False
        flushed = drained or (arrived - self._began) % self._flush == 0
        return disk_store.due(self._method, self._store.commit_every, arrived - self._made, flushed, drained=drained)

    def made(self, arrived: int) -> None:
        """Note that a version was made with all micro-batches that had arrived."""
        self._made = arrived

    @property
    def stale(self) -> bool:
        """Whether the folder holds a version, which is of another training once a state was loaded."""
        return self._store is not None and self._store.versions.newest is not None

    def overdue(self) -> None:
        """Note that a version is due at the next moment, whatever has arrived."""
        self._made = -math.inf

    def restart(self, arrived: int) -> None:
        """Note that the schedule begins anew with the next micro-batch."""
        self._began = arrived


def choose(store: DiskStore, ranks: Ranks | SingleProcess) -> None:
    """Resume from the newest version that the folders of all ranks hold, if they hold any."""
    mine = store.versions.numbers, store.versions.begun, processes(store.root)
    everywhere = ranks.gather(mine, "Pipeline()")
    common = set.intersection(*(there for there, _, _ in everywhere))
    if common:
        store.versions.choose(max(common))
    elif any(there for there, _, _ in everywhere):
        raise StoreError(f"{store.folder}: the ranks hold no version in common; give the store an empty folder")
    elif others := max(count for _, _, count in everywhere):
        raise StoreError(
            f"{store.root}: holds a version of a training in {counted(others, 'process')}, and this one is "
            f"in {len(everywhere)}; start as many as before, or give the store an empty folder to begin anew"
        )
    elif any(committed for _, (committed, _), _ in everywhere):
        raise StoreError(
            f"{store.root}: a version was committed here, but version-*.json is missing, which says where the "
            "weights lie; restore the folder from a copy, or give the store an empty one to begin anew"
        )
    elif store.versions.begun[1]:
        warnings.warn(
            f"{store.folder}: there are pages of stages but no version: training ended before its first commit, and "
            "begins anew",
            stacklevel=4,
        )


def found(
    store: DiskStore, ranks: Ranks | SingleProcess, mine: Sequence[int] | None, count: int
) -> dict[str, Any] | None:
    """Return the chosen state, or None. mine: the stages that this rank will hold; None: all `count` stages."""
    saved = store.versions.state()
    if saved is None:
        return None
    wanted = mine or range(count if ranks.several else 0)
    if missing := store.versions.lacks(wanted, ranks.replica):
        raise StoreError(
            f"{store.folder}: does not hold stage {missing[0]}, but other ranks do; start as many ranks, workers "
            "and replicas as before, or give the store another folder"
        )
    return saved


def commit(
    store: DiskStore,
    ranks: Ranks | SingleProcess,
    stages: Sequence[Stage],
    loops: Sequence[Loop],
    plain: dict[str, Any],
    saving: pipeline_state.Opened,
) -> None:
    """Commit the whole state; no operation may be running. The version before is removed once all ranks have this one.

    saving: a context in which a stage's micro-batches in flight can be saved.
    """
    described: dict[str, Any] = {}

    def take(stage: Stage, tensors: dict[str, Tensor]) -> None:
        described[f"{stage.index}/{stage.replica}"] = store.begin(stage, tensors)

    share = pipeline_state.share(stages, loops, saving, take, copy=False)
    whole = pipeline_state.merge(ranks.gather(share, "commit()"), plain)
    store.finish(described, {"format": whole["format"], "plain": whole["plain"]})
    ranks.gather(None, "commit()")
    store.forget()
