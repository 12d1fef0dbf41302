"""Histories: what curves show beside the compared metric: the training loss, and the gap that staleness makes.

A log may hold a value per batch, so each run's values are averaged in windows of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeback.recipes.reports.metric import mean_and_deviation
from pipeback.recipes.reports.runs import Curve, Method, at, end, has
from pipeback.recipes.reports.sources import Run

LOSS = "train/loss"
GAP = re.compile(r"pipeback/gap/stage_\d+$")
WINDOWS = 40  # of training, from its first step to its last; a window is a point of a curve
MONITOR = "pipeback.lightning.PipelineMonitor"

Points = Callable[[Run], list[tuple[float, float]]]  # run -> (step, value)


class History(NamedTuple):
    """What the curves of a picture show.

    name: of the picture. label: of its axis. text: a value with its unit. curve: (method, axis) -> means and seeds;
    without points where the method's runs have none. share: values run from 0 to 1. whole: how curves begin is shown,
    however far that is from the rest. missing: why no method has any.
    """

    name: str
    label: str
    text: Callable[[float], str]
    curve: Callable[[Method, str], Curve]
    share: bool = False
    whole: bool = True
    missing: str = ""

    @property
    def title(self) -> str:
        return self.label[0].upper() + self.label[1:]


def histories(methods: Sequence[Method]) -> list[History]:
    """Return the compared metric, the training loss and the gap, in the order in which they are shown."""
    metric = methods[0].metric
    unprobed = f"no run logged pipeback/gap/stage_00 and so on; the callback {MONITOR} does"
    return [
        History("", metric.held_out, metric.text, Method.curve, metric.share, whole=False),
        History("training_loss", "training loss", "{:.3g}".format, lambda m, axis: averaged(m, axis, losses),
                missing=_missing(methods, losses, f"no run logged {LOSS}")),
        History("mean_gap", "gap ‖w now − w used‖", "{:.3g}".format, lambda m, axis: averaged(m, axis, gaps),
                missing=_missing(methods, gaps, unprobed)),
    ]  # fmt: skip


def _missing(methods: Sequence[Method], points: Points, why: str) -> str:
    return "" if any(points(run) for m in methods for run in m.runs) else why


def losses(run: Run) -> list[tuple[float, float]]:
    """Return (step, loss) of each logged training loss, until the run diverged if it did."""
    return _finite(run, run.values(LOSS))


def gaps(run: Run) -> list[tuple[float, float]]:
    """Return (step, gap) of each probe, until the run diverged if it did; the gap is the mean over stages."""
    columns = [name for name in run.columns if GAP.match(name)]
    probed = [(row["step"], [row[name] for name in columns if name in row]) for row in run.rows]
    return _finite(run, [(step, sum(some) / len(some)) for step, some in probed if some])


def _finite(run: Run, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stop = end(run)
    return [(step, value) for step, value in points if math.isfinite(value) and step < stop]


def averaged(method: Method, axis: str, points: Points) -> Curve:
    """Return the curve of a method's runs over an axis; a window is as long for each seed."""
    chosen = [(run, found) for run in method.runs if has(run, axis) and (found := points(run))]
    last = max((found[-1][0] for _, found in chosen), default=0.0)
    windows: dict[int, tuple[list[float], list[float]]] = {}
    for run, found in chosen:
        mine: dict[int, list[tuple[float, float]]] = {}
        for step, value in found:
            mine.setdefault(min(WINDOWS - 1, int(WINDOWS * step / (last + 1))), []).append((step, value))
        for window, some in mine.items():
            xs, ys = windows.setdefault(window, ([], []))
            xs.append(math.fsum(at(run, axis, [step for step, _ in some])) / len(some))
            ys.append(math.fsum(value for _, value in some) / len(some))
    shown = [windows[n] for n in sorted(windows)]
    return Curve([mean_and_deviation(xs)[0] for xs, _ in shown], [ys for _, ys in shown])
