"""Versions: when a disk store keeps everything, how all ranks do so together, and how a pipeline goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeback import state
from pipeback.disk import DiskStore
from pipeback.loop import Loop
from pipeback.pages import StoreError
from pipeback.ranks import Alone, Ranks
from pipeback.stage import Stage


def choose(store: DiskStore, ranks: Ranks | Alone) -> None:
    """Go on from the newest version that the folders of all ranks hold, if they hold any."""
    everywhere = ranks.gather(store.versions, "Pipeline()")
    common = set.intersection(*everywhere)
    if common:
        store.choose(max(common))
    elif any(everywhere):
        raise StoreError(f"{store.folder}: the ranks hold no version in common; give the store an empty folder")


def found(store: DiskStore, ranks: Ranks | Alone, mine: Sequence[int] | None, count: int) -> dict[str, Any] | None:
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
    store: DiskStore, ranks: Ranks | Alone, stages: Sequence[Stage], loops: Sequence[Loop], plain: dict[str, Any]
) -> None:
    """Keep everything as it is; the pipeline must be quiet. The version before goes when all ranks have this one."""
    described: dict[str, Any] = {}

    def take(stage: Stage, tensors: dict[str, Tensor]) -> None:
        described[f"{stage.index}/{stage.replica}"] = store.begin(stage, tensors)

    share = state.share(stages, loops, take=take, copy=False)
    whole = state.merge(ranks.gather(share, "commit()"), plain)
    store.finish(described, {"format": whole["format"], "plain": whole["plain"]})
    ranks.gather(None, "commit()")
    store.forget()
