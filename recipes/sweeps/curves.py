"""Curves: the training loss of a run, smoothed, and by which factor delay slows a run down.

    slow-down = updates of the run until its smoothed loss is L, over those of the reference
    L = the larger one of both last losses, so that either reaches it

The loss of a training batch is that before its update, on data that was not seen before, as long as there is one epoch.
In a pipeline every stage computes it on the weights of its own forward, which may be predicted, so that it is not the
loss of one model. That of one model is held out, at the end, when no micro-batch is in flight any more:

    held-out slow-down = all updates of the run, over those until the reference has the larger of both last losses
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SMOOTHED = 50  # updates whose mean loss is one point of a curve


class Curve(NamedTuple):
    """updates: counted from 1. losses: means of the last `SMOOTHED` of them."""

    updates: list[int]
    losses: list[float]

    @property
    def end(self) -> float:
        return self.losses[-1] if self.losses else math.nan

    def at(self, update: int) -> float:
        """The last loss up to this update; nan if there is none."""
        before = [loss for at, loss in zip(*self, strict=True) if at <= update]
        return before[-1] if before else math.nan


def curve(run: Path) -> Curve:
    """The curve of a run, from its metrics.csv."""
    return smoothed(*_logged(run, "train/loss"))


def held_out(run: Path) -> Curve:
    """The held-out losses of a run, from its metrics.csv; the last one is that of the drained pipeline."""
    updates = _logged(run, "train/loss").updates
    logged = _logged(run, "val/loss")
    by_update = {min(at, updates[-1]): loss for at, loss in zip(*logged, strict=True)} if updates else {}
    return Curve(list(by_update), list(by_update.values()))


def _logged(run: Path, column: str) -> Curve:
    """What a run has logged in a column, by update; of what it logged twice, the last."""
    file = run / "metrics.csv"
    if not file.is_file():
        return Curve([], [])
    with open(file, newline="") as lines:
        found = {int(row["step"]) + 1: float(row[column]) for row in csv.DictReader(lines) if row.get(column)}
    return Curve(sorted(found), [found[update] for update in sorted(found)])


def smoothed(updates: Sequence[int], losses: Sequence[float], width: int = SMOOTHED) -> Curve:
    """Means over the last `width` updates; the first ones are left out, unless there are no others."""
    found, begin = Curve([], []), 0
    for n, update in enumerate(updates):
        while updates[begin] <= update - width:
            begin += 1
        if update >= min(width, updates[-1]):
            part = losses[begin : n + 1]
            found.updates.append(update)
            found.losses.append(sum(part) / len(part))
    return found


def reaches(some: Curve, loss: float) -> float:
    """The first update, between two points by a line, at which a curve is down to a loss; inf if it never is."""
    before: tuple[int, float] | None = None
    for update, value in zip(*some, strict=True):
        if value <= loss:
            if before is None or before[1] <= value:
                return float(update)
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (update - before[0])
        before = update, value
    return math.inf


def slow_down(run: Curve, reference: Curve) -> float:
    """The slow-down of a run; 1 for the reference. nan where it cannot be told: without an end, or where the reference
    begins below the loss, since when it was there is not known: its first point is a mean of many updates.
    """
    if not run.losses or not reference.losses or not math.isfinite(run.end):
        return math.nan
    if run == reference:
        return 1.0
    loss = max(run.end, reference.end)
    return reaches(run, loss) / reaches(reference, loss) if reference.losses[0] > loss else math.nan


def held_out_slow_down(run: Curve, reference: Curve) -> float:
    """The held-out slow-down of two curves of `held_out`; at least 1, since the reference is at its end not before its
    end. nan where it cannot be told: without an end, or where the reference begins below the loss.
    """
    if not run.losses or not reference.losses or not math.isfinite(run.end):
        return math.nan
    loss = max(run.end, reference.end)
    return run.updates[-1] / reaches(reference, loss) if reference.losses[0] > loss else math.nan
