"""Loop progress: how far the loops of a state were, merged over the workers and checked before one goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def merge_progress(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the progress of several workers of one pipeline, which are equally far but remember different entries."""
    whole = dict(parts[0])
    for n, part in enumerate(parts):
        if (part["fresh"], part["start"]) != (whole["fresh"], whole["start"]):
            raise RuntimeError(
                f"the pipeline was drained on worker 0 or on worker {n}, and not on the other; every rank must call "
                "drain() at the same micro-batch"
            )
    for key in ("entries", "options", "sizes"):
        whole[key] = {i: v for part in parts for i, v in part[key].items()}
    return whole


def check_progress(saved: dict[str, Any], arrived: int, stages: int) -> None:
    """Raise ValueError unless this progress is possible for `stages` stages after `arrived` micro-batches."""
    order = saved["order"]
    begun = order["arrived"] - order["start"]
    for name in ("fetched", "forwards", "backwards", "updated"):
        if len(order[name]) != stages or not all(type(n) is int for n in order[name]):
            raise ValueError(f"the state does not say how far each of the {stages} stages is ({name}); {_EDITED}")
    counts = zip(order["fetched"], order["forwards"], order["backwards"], order["updated"], strict=True)
    for s, (fetched, forwards, backwards, updated) in enumerate(counts):
        least = 1 + forwards + backwards  # operations taken from the program, the next one included
        if order["arrived"] != arrived or not 0 <= updated <= backwards <= forwards <= begun <= arrived:
            raise ValueError(
                f"the state says of stage {s} that of {begun} micro-batches {forwards} have gone forward, {backwards} "
                f"backward and {updated} into the weights, after {arrived} in all; {_EDITED}"
            )
        if not least <= fetched <= least + updated:
            raise ValueError(
                f"the state says of stage {s} that {fetched} operations were taken from its schedule, where {forwards} "
                f"forwards and {backwards} backwards make {least} to {least + updated}; {_EDITED}"
            )


_EDITED = "it was edited or damaged, load another one"
