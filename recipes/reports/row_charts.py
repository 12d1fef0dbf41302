"""Row charts: a row per method for the page: final values with their seeds, and bars of what training took.

Places are in percent of a chart's width, and rows have their method's name above, so letters keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.recipes.reports.bars import Bar
from pipeback.recipes.reports.charts import Mark, written
from pipeback.recipes.reports.metric import mean_and_deviation, spread
from pipeback.recipes.reports.runs import Method
from pipeback.recipes.reports.scales import Scale
from pipeback.recipes.reports.style import Paint


class Row(NamedTuple):
    """A method. value: on the right. mean: its place; None without a number. ends: one deviation each way."""

    label: str
    paint: str
    value: str
    failed: bool = False
    mean: float | None = None
    ends: tuple[float, float] = (0.0, 0.0)
    told: str = ""
    seeds: Sequence[Mark] = ()


class Rows(NamedTuple):
    """A panel. bars: from zero to the mean; else a dot at the mean. dotted: the place of a line through all rows."""

    title: str
    bars: bool
    bottom: Sequence[Mark]
    rows: Sequence[Row]
    dotted: float | None = None


def finals(methods: Sequence[Method], paint: Paint) -> Rows:
    """Return the last held-out values, best first: a dot per seed, their mean, and one deviation each way."""
    metric = methods[0].metric
    kept = [m for m in methods if m.finals and not m.fate]
    kept.sort(key=lambda m: metric.ahead(mean_and_deviation(m.finals)[0]))
    ends = [end for m in kept for end in (*m.finals, *around(m.finals))] or [0.0]
    room = 0.06 * (max(ends) - min(ends)) or 0.05 * abs(max(ends)) or 1.0
    low, high = min(ends) - room, max(ends) + room
    across = Scale(max(low, -0.02), min(high, 1.02)) if metric.share else Scale(low, high)
    rows = []
    for m in kept:
        failed = f", {sum(m.diverged)} of {len(m.runs)} diverged" if any(m.diverged) else ""
        text = spread(m.finals, metric.form, metric.scale) + metric.unit
        seeds = [Mark(place(across, v), f"{m.label}, one seed: {metric.text(v)}") for v in m.finals]
        rows.append(Row(
            m.label, paint.name(m), text + failed, bool(failed), place(across, mean_and_deviation(m.finals)[0]),
            places(across, m.finals), f"{m.label}: {metric.held_out} {text}",
            seeds if len(seeds) > 1 else (),
        ))  # fmt: skip
    rows += [Row(m.label, paint.name(m), m.fate or "unfinished", failed=True) for m in methods if m not in kept]
    dotted = next((row.mean for row in rows if row.label == "sgd"), None)
    bottom = [Mark(place(across, n), written(n, metric.share)) for n in across.marks(5) if kept]
    return Rows(f"{metric.held_out} at the end", False, bottom, rows, dotted)


def around(values: Sequence[float]) -> tuple[float, float]:
    mean, deviation = mean_and_deviation(values)
    return mean - (deviation or 0.0), mean + (deviation or 0.0)


def place(across: Scale, value: float) -> float:
    return round(across.place(value), 2)


def places(across: Scale, values: Sequence[float]) -> tuple[float, float]:
    """Return the places of one deviation below the mean and of one above."""
    low, high = around(values)
    return place(across, low), place(across, high)


def bars(methods: Sequence[Method], found: Sequence[Bar], none: str, paint: Paint) -> list[Rows]:
    """Return a panel per measure, a bar per method. none: the text where a method has no number."""
    panels = []
    for title, form, numbers in found:
        values = {m.label: numbers(m) for m in methods}
        across = Scale(0.0, max((around(some)[1] for some in values.values() if some), default=0.0) or 1.0)
        rows = []
        for m in methods:
            if not (some := values[m.label]):
                rows.append(Row(m.label, paint.name(m), none, failed=True))
                continue
            text = spread(some, form).removesuffix(" ±0")
            told = f"{m.label}: {text} {title}" + (f" over {len(some)} seeds" if len(some) > 1 else "")
            rows.append(
                Row(
                    m.label,
                    paint.name(m),
                    text,
                    False,
                    place(across, mean_and_deviation(some)[0]),
                    places(across, some),
                    told,
                )
            )
        panels.append(Rows(title, True, [Mark(place(across, n), f"{n:,.10g}") for n in across.marks(4)], rows))
    return panels
