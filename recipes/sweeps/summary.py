"""Summary: what came of a sweep: every method at its best rate, in a table for each choice of the other options.

The best rate is that at which the mean training loss over the seeds ends lowest, among the rates with the most seeds;
a run that diverged, or has logged no loss, ends at infinity, and a method all of whose runs do has none. The methods
are in the order of their slow-downs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from pipeback.recipes.reports.metric import Metric, number, spread
from pipeback.recipes.reports.sheet import Sheet
from pipeback.recipes.sweeps.curves import SMOOTHED
from pipeback.recipes.sweeps.jobs import RATE
from pipeback.recipes.sweeps.table import BATCHES, Results, Row, caption, reference_of


class Tried(NamedTuple):
    """A method under one choice of options. rates: its runs, one per seed, by rate ("" if none was varied)."""

    method: str
    rates: dict[str, list[Row]]

    @property
    def rate(self) -> str:
        """The best rate."""
        return min(self.rates, key=lambda rate: (-_telling(self.rates[rate]), mean(map(end, self.rates[rate]))))

    @property
    def rated(self) -> bool:
        """Whether any run has a training loss that speaks for a rate."""
        return any(math.isfinite(end(row)) for rows in self.rates.values() for row in rows)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the least or the largest of several."""
        tried = sorted(map(float, filter(None, self.rates)))
        return self.rated and len(tried) > 1 and float(self.rate) in (tried[0], tried[-1])

    @property
    def best(self) -> list[Row]:
        """The runs at the best rate."""
        return self.rates[self.rate]

    @property
    def finished(self) -> list[Row]:
        return [row for row in self.best if row.state == "finished"]

    @property
    def time(self) -> float:
        """The time of an update, see `Row`."""
        return self.best[0].time

    @property
    def held_out(self) -> list[float]:
        """The held-out slow-downs of the runs that have one."""
        return [row.held_out_slow_down for row in self.finished if not math.isnan(row.held_out_slow_down)]

    @property
    def slow_downs(self) -> list[float]:
        """Those of the runs that have one; one that never gets there is infinite."""
        return [row.slow_down for row in self.finished if not math.isnan(row.slow_down)]

    @property
    def slow_down(self) -> float:
        """The median over the seeds; infinite if there is none."""
        return median(self.slow_downs) if self.slow_downs else math.inf


class Setting(NamedTuple):
    """A choice of the options that are varied beside rates and seeds."""

    options: dict[str, str]
    tried: list[Tried]

    def speed_ups(self, tried: Tried, reference: str) -> list[float]:
        """How much sooner its runs have a loss than the reference, where every stage has a worker; [] if unknown."""
        times = [row.time for other in self.tried if other.method == reference for row in other.best]
        if not times or not math.isfinite(tried.time):
            return []
        return [times[0] / (tried.time * slow) for slow in tried.slow_downs if math.isfinite(times[0])]


def settings(found: Results) -> list[Setting]:
    """The settings of a sweep in its order, each with its methods."""
    by: dict[tuple[tuple[str, str], ...], dict[str, Tried]] = {}
    for row in found.rows:
        of = tuple((key, value) for key, value in row.options.items() if key != RATE)
        tried = by.setdefault(of, {}).setdefault(row.method, Tried(row.method, {}))
        tried.rates.setdefault(row.options.get(RATE, ""), []).append(row)
    return [Setting(dict(of), sorted(methods.values(), key=_place)) for of, methods in by.items()]


def _place(tried: Tried) -> tuple[float, float]:
    return tried.slow_down, mean(end(row) for row in tried.best)


def _telling(rows: Iterable[Row]) -> int:
    """How many runs tell something of their rate: they have logged a loss, or diverged."""
    return sum(row.updates > 0 or row.state != "finished" for row in rows)


def end(row: Row) -> float:
    """The last training loss of a run; infinite if it diverged or has logged none."""
    return row.train_loss if row.state == "finished" and math.isfinite(row.train_loss) else math.inf


def mean(values: Iterable[float]) -> float:
    every = list(values)
    return math.fsum(every) / len(every)


def sheets(found: Results) -> list[Sheet]:
    """A table for each setting."""
    every = settings(found)
    return [_sheet(found, setting, f"{caption(setting.options)}" or found.experiment) for setting in every]


def _sheet(found: Results, setting: Setting, title: str) -> Sheet:
    measures = list(dict.fromkeys(name for tried in setting.tried for row in tried.best for name in row.measures))
    varied = any(len(tried.rates) > 1 or "" not in tried.rates for tried in setting.tried)
    failed = any(len(tried.finished) < len(tried.best) for tried in setting.tried)
    reference = reference_of(found)
    timed = any(setting.speed_ups(tried, reference) for tried in setting.tried if tried.method != reference)
    head = ["method", *(["best rate"] if varied else []), "slow-down", *(["pipeline speed-up"] if timed else [])]
    head += ["held-out slow-down", "training loss"]
    head += [f"held-out {Metric(name).name}{Metric(name).unit}" for name in measures]
    head += ["seeds", *(["diverged"] if failed else [])]
    rows = []
    for tried in setting.tried:
        cells = [tried.method, *([_best_rate(tried)] if varied else []), _slow(tried.slow_downs)]
        cells += [_slow(setting.speed_ups(tried, reference))] if timed else []
        cells.append(_slow(tried.held_out))
        logged = [row.train_loss for row in tried.finished if not math.isnan(row.train_loss)]
        cells.append(spread(logged, ".3f") if tried.finished else "diverged")
        for metric in map(Metric, measures):
            values = [row.measures[metric.column] for row in tried.finished if metric.column in row.measures]
            cells.append(spread(values, metric.form, metric.scale))
        cells.append(str(len(tried.best)))
        rows.append([*cells, *([f"{len(tried.best) - len(tried.finished)}"] if failed else [])])
    return Sheet("results", title, head, rows, [list(head), *map(list, rows)], _notes(found, setting, timed))


def _best_rate(tried: Tried) -> str:
    """0.03 *"""
    return tried.rate + " *" * tried.at_edge if tried.rated else "–"


def _slow(values: Sequence[float]) -> str:
    """1.07 (1.03 to 1.09)"""
    if not values:
        return "–"
    middle = number(median(values), ".2f")
    least, largest = (number(value, ".2f") for value in (min(values), max(values)))
    return middle if min(values) == max(values) else f"{middle} ({least} to {largest})"


def _untold(setting: Setting, reference: str) -> bool:
    """Whether a run has an end, and the reference too, but no slow-down."""
    mine = {tried.method: tried.finished for tried in setting.tried}
    others = [row for method, rows in mine.items() for row in rows if method != reference and math.isfinite(end(row))]
    seeds = {row.seed for row in mine.get(reference, ()) if math.isfinite(end(row))}
    return any(row.seed in seeds and math.isnan(row.slow_down) for row in others)


def _notes(found: Results, setting: Setting, timed: bool) -> str:
    """What the columns are."""
    reference = reference_of(found)
    by_method = {tried.method: ", ".join(sorted(filter(None, tried.rates), key=float)) for tried in setting.tried}
    rates = set(by_method.values())
    if len(rates) > 1:  # each method has its own
        each = (
            f" The best rate is one of those tried ({'; '.join(f'{name}: {own}' for name, own in by_method.items())})"
        )
    else:
        (one,) = rates
        each = f" The best rate is that of {one}" if "," in one else ""
    if any(tried.at_edge for tried in setting.tried):
        each += "; * the least or the largest one tried, so that one beyond may be better"
    least = min((row.updates for row in found.rows), default=SMOOTHED)
    means = f"of {SMOOTHED} updates at the end" if least >= SMOOTHED else f"of at most {SMOOTHED} updates at the end"
    batches = next((f" In this table, {note}." for note in found.notes if note.startswith(BATCHES)), "")
    if any(row.state == "finished" and not row.updates for row in found.rows):
        batches += (
            " Runs that logged no training loss have no best rate and no slow-down: it is logged every "
            "trainer.log_every_n_steps batches, and they had fewer; give trainer.log_every_n_steps=1."
        )
    if _untold(setting, reference):
        batches += (
            f" A run that ends above the first training loss of {reference}, a mean of up to {SMOOTHED} updates, has "
            "no slow-down: when that loss was reached is not known."
        )
    speeds = (
        f" The pipeline speed-up is the time of {reference} until that loss over that of the method, where every stage "
        f"has a worker and all take the same time; {reference} then runs one stage after the other."
    )
    return (
        f"The slow-down is the number of updates until a training loss, over those of {reference}. That loss is one of "
        "forwards, whose weights may be predicted; the held-out slow-down is that of the model at the end, at least 1, "
        f"and – where {reference} began below its loss. Both are medians over "
        f"the seeds, with the least and the largest. Training losses are means {means}. All "
        f"others are mean ± standard deviation over the seeds.{each and f'{each}.'}{batches}{speeds if timed else ''}"
    )
