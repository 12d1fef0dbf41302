"""Runs: groups runs by method, with curves, final values, divergence and the time to a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeback.recipes.reports import options
from pipeback.recipes.reports.metric import GUESSES, Metric, mean_and_deviation
from pipeback.recipes.reports.sources import Run

# the order of the rows; a family shares a panel of a picture, and the references are in every panel
REFERENCES = ("sgd", "pb")
FAMILIES = {
    "Spike compensation, weight prediction": ("sc", "lwp", "lwp_w", "cerebras", "lwp_w_sc"),
    "Stashing, prediction, rescheduling": ("pipedream", "spectrain", "pipemare"),
    "Prediction by the optimizer, error feedback": ("pipeoptim", "xpipe", "msnag", "ef"),
    "Changed gradients, rates, coordinates": (
        "gap_aware", "dc_asgd", "dc_asgd_a", "braking", "staleness_lr", "eigendelay",
    ),
    "Update size above one": ("gpipe", "one_f_one_b", "pipedream_2bw"),
}  # fmt: skip
KNOWN = (*REFERENCES, *(name for family in FAMILIES.values() for name in family))
SAMPLES, STEPS, SECONDS = "samples_seen", "step", "wall_time"  # the x axes of curves


class Curve(NamedTuple):
    """A curve over seeds. x: the mean position of each point. values: per point, one value per seed that got there."""

    x: list[float]
    values: list[list[float]]

    @property
    def mean(self) -> list[float]:
        return [mean_and_deviation(v)[0] for v in self.values]


class Method:
    """The runs of one method, over seeds."""

    def __init__(self, label: str, runs: Sequence[Run], metric: Metric) -> None:
        self.label, self.runs, self.metric = label, list(runs), metric
        self.facts = self.runs[0].facts

    @property
    def base(self) -> str:
        """The name of the method, without the options that tell its runs apart."""
        return str(self.facts.get("method", self.label)).removesuffix("_slack2")

    @property
    def equal_slack(self) -> bool:
        """Whether the runs were made to compare at slack 2."""
        return str(self.facts.get("method", "")).endswith("_slack2")

    @property
    def equal_delay(self) -> bool:
        """Whether the method runs at slack 2, by its counted delays or since the runs were made for that."""
        return self.equal_slack or bool(self.facts.get("slack2"))

    @property
    def delay(self) -> int | None:
        """The delay of the first stage, in updates."""
        delays = self.facts.get("delays")
        return int(delays[0]) if delays else None

    @cached_property
    def diverged(self) -> list[bool]:
        """Per run, whether its loss became infinite or NaN."""
        return [math.isfinite(end(run)) for run in self.runs]

    @property
    def unstable(self) -> bool:
        """Whether its loss is finite, but ends well above that of guessing."""
        classes = self.facts.get("classes")
        return bool(self.losses and classes) and mean_and_deviation(self.losses)[0] > 2 * math.log(classes)

    @property
    def losses(self) -> list[float]:
        """The last held-out loss, one per run that did not diverge."""
        found = [run.last("val/loss") for run, diverged in zip(self.runs, self.diverged, strict=True) if not diverged]
        return [loss for loss in found if loss is not None]

    @property
    def fate(self) -> str:
        """A word in place of the final value, if that is not worth showing."""
        if all(self.diverged):
            return "diverged"
        return "unstable" if self.unstable else "" if self.finals else "unfinished"

    @cached_property
    def held_out(self) -> list[list[tuple[float, float]]]:
        """Per run, (step, value) of the metric, until it diverged if it did.

        Of two measurements after the same samples the later counts: at the end, that is the one after the drain.
        """
        found = []
        for run in self.runs:
            stop = end(run)
            points = [(step, v) for step, v in run.values(self.metric.column) if math.isfinite(v) and step < stop]
            places = at(run, SAMPLES if has(run, SAMPLES) else STEPS, [step for step, _ in points])
            found.append(sorted(dict(zip(places, points, strict=True)).values()))
        return found

    @property
    def finals(self) -> list[float]:
        """The last held-out value, one per run that did not diverge."""
        return [p[-1][1] for p, diverged in zip(self.held_out, self.diverged, strict=True) if p and not diverged]

    def after(self, epoch: int) -> list[float]:
        """Return the held-out value at the end of an epoch, one per run that got there without diverging."""
        found = []
        for run, points, diverged in zip(self.runs, self.held_out, self.diverged, strict=True):
            if not diverged and points and run.facts.get("epoch_samples") and has(run, SAMPLES):
                seen = at(run, SAMPLES, [step for step, _ in points])
                end = epoch * run.facts["epoch_samples"]
                found += [value for (_, value), n in zip(points, seen) if round(n) == end][-1:]
        return found

    def curve(self, axis: str) -> Curve:
        """Return held-out values over samples, steps or seconds, at the points of all seeds, with interpolation."""
        chosen = [(run, points) for run, points in zip(self.runs, self.held_out) if points and has(run, axis)]
        places: dict[float, list[tuple[float, float]]] = {}
        grid = sorted({step for _, points in chosen for step, _ in points})
        for run, points in chosen:
            steps, values = zip(*points)
            here = [step for step in grid if steps[0] <= step <= steps[-1]]
            for step, x, y in zip(here, at(run, axis, here), np.interp(here, steps, values)):
                places.setdefault(step, []).append((x, float(y)))
        columns = [list(zip(*places[step])) for step in sorted(places)]
        return Curve([mean_and_deviation(xs)[0] for xs, _ in columns], [list(ys) for _, ys in columns])

    def number(self, column: str) -> list[float]:
        """Return the last value of a column, one per run that has it."""
        return [value for run in self.runs if (value := run.last(column)) is not None and math.isfinite(value)]

    @property
    def rates(self) -> list[float]:
        """The samples per second of training, one per run."""
        found = []
        for run in self.runs:
            samples, seconds = run.last(SAMPLES), run.last(SECONDS)
            rate = samples / seconds if samples and seconds else run.last("pipeback/throughput")
            found += [] if rate is None else [rate]
        return found

    def first(self, target: float) -> list[float | None]:
        """Return the step of each run's first measurement at or past the target; None if there was none."""
        return [next((s for s, v in points if self.metric.reached(v, target)), None) for points in self.held_out]

    def until(self, target: float, axis: str) -> list[float]:
        """Return samples, steps or seconds to the target, one per run that reached it."""
        return [at(run, axis, [step])[0] for run, step in zip(self.runs, self.first(target))
                if step is not None and has(run, axis)]  # fmt: skip


def end(run: Run) -> float:
    """Return the step at which a loss became infinite or NaN; infinity if none did."""
    steps = (row["step"] for row in run.rows for name, v in row.items() if "loss" in name and not math.isfinite(v))
    return next(steps, math.inf)


def has(run: Run, axis: str) -> bool:
    return axis == STEPS or any(axis in row for row in run.rows)


def at(run: Run, axis: str, steps: Sequence[float]) -> list[float]:
    """Return the run's positions on an axis at these steps, interpolated between logged points."""
    if axis == STEPS:
        return list(steps)
    known = dict(run.values(axis))  # of two values at one step, the later
    order = sorted(known)
    return [float(x) for x in np.interp(steps, order, [known[step] for step in order])]


def gather(runs: Sequence[Run]) -> list[Method]:
    """Group runs by method; runs of one name that differ in more than the seed get labels with what differs."""
    metric = compared(runs)
    # by seed, since folders that W&B made within one second have no order
    runs = sorted(runs, key=lambda run: str(run.facts.get("seed", "")).rjust(12))
    methods = [Method(label, some, metric) for label, some in options.told_apart(runs).items()]
    return sorted(methods, key=lambda m: (KNOWN.index(m.base) if m.base in KNOWN else len(KNOWN), m.label))


def compared(runs: Sequence[Run]) -> Metric:
    """Return the metric that all runs name or, if they name none, the first known one that they logged."""
    found: dict[Metric, list[str]] = {}
    for run in runs:
        named = run.facts.get("metric") or next((name for name in GUESSES if name in run.columns), None)
        if named is None:
            named = next((c for c in run.columns if c.startswith("val")), None)
        if named is None:
            continue
        mode = run.facts.get("mode") or ("min" if "loss" in named or "perplexity" in named else "max")
        found.setdefault(Metric(str(named), str(mode)), []).append(run.origin)
    if not found:
        raise ValueError(f"{runs[0].origin}: no held-out value (val/...) was logged, nor in any other of the runs")
    if len(found) > 1:
        told = "; ".join(f"{m.column} in {some[0]}" + (f" and {len(some) - 1} more" if some[1:] else "")
                         for m, some in found.items())  # fmt: skip
        raise ValueError(f"the runs compare different metrics ({told}): make a report of each")
    return next(iter(found))
