"""Commits: when a disk store keeps everything, how all ranks do so together, and how a pipeline goes on from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeback.checkpoint import pipeline_state
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.errors import StoreError
from pipeback.methods.base import Method
from pipeback.runtime.loop import Loop
from pipeback.schedules.programs import flush
from pipeback.stages.stage import Stage
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import Store


class Commits:
    """When a version is due: at each flush of methods that flush, else every `DiskStore.commit_every` micro-batches."""

    def __init__(self, method: Method, store: Store | None) -> None:
        self._method, self._store = method, store if isinstance(store, DiskStore) else None
        self._flush = 1 if method.flush_each_push else flush(method.schedule)  # micro-batches
        self._made = 0  # micro-batches that had arrived at the last commit
        self._began = 0  # and when the schedule last began anew

    def due(self, arrived: int) -> bool:
        """Once so many have arrived. Counted, not looked up: threads may be at work, and all ranks have to agree."""
        if self._store is None:
            return False
        flushed = (arrived - self._began) % self._flush == 0
        return disk_store.due(self._method, self._store.commit_every, arrived - self._made, flushed)

    def made(self, arrived: int) -> None:
        """A version has all that arrived."""
        self._made = arrived

    def restart(self, arrived: int) -> None:
        """The schedule begins anew with the next one."""
        self._began = arrived


def choose(store: DiskStore, ranks: Ranks | SingleProcess) -> None:
    """Go on from the newest version that the folders of all ranks hold, if they hold any."""
    everywhere = ranks.gather((store.versions, store.begun), "Pipeline()")
    common = set.intersection(*(there for there, _ in everywhere))
    if common:
        store.choose(max(common))
    elif any(there for there, _ in everywhere):
        raise StoreError(f"{store.folder}: the ranks hold no version in common; give the store an empty folder")
    elif any(committed for _, (committed, _) in everywhere):
        raise StoreError(
            f"{store.root}: a version was committed here, but version-*.json is missing, without which nobody "
            "knows what lies where; restore the folder from a copy, or give the store an empty one to begin anew"
        )
    elif store.begun[1]:
        warnings.warn(
            f"{store.folder}: there are pages of stages but no version: training ended before its first commit, and "
            "begins anew",
            stacklevel=5,
        )


def found(
    store: DiskStore, ranks: Ranks | SingleProcess, mine: Sequence[int] | None, count: int
) -> dict[str, Any] | None:
    """The state that was chosen, or None. mine: the stages that this rank is to hold, None: all of the `count`."""
    saved = store.state()
    if saved is None:
        return None
    wanted = mine or range(count if ranks.several else 0)
    if missing := store.lacks(wanted, ranks.replica):
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
    """Keep everything as it is; the pipeline must be quiet. The version before goes when all ranks have this one.

    saving: the time in which what a stage has in flight can be saved.
    """
    described: dict[str, Any] = {}

    def take(stage: Stage, tensors: dict[str, Tensor]) -> None:
        described[f"{stage.index}/{stage.replica}"] = store.begin(stage, tensors)

    share = pipeline_state.share(stages, loops, saving, take, copy=False)
    whole = pipeline_state.merge(ranks.gather(share, "commit()"), plain)
    store.finish(described, {"format": whole["format"], "plain": whole["plain"]})
    ranks.gather(None, "commit()")
    store.forget()
