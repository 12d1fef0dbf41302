"""Pictures of a sweep, a row of panels for each setting: losses over updates, over the time of a pipeline where it is
known, and slow-downs, all at the best rates; and how the last loss depends on the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from pipeback.recipes.reports.scales import Scale, of_curves
from pipeback.recipes.reports.style import INK, RED, STYLE, WIDE, free, names, plain_numbers
from pipeback.recipes.sweeps.summary import Setting, Tried, end, mean, settings
from pipeback.recipes.sweeps.table import POINTS, Results, caption

Colours = Mapping[str, tuple[str, Any]]  # colour and dashes of every method
FAR = 4.0  # times the reference: a longer axis of slow-downs is logarithmic


def draw(found: Results) -> plt.Figure:
    """Draw the results of a sweep."""
    every = settings(found)
    methods = list(dict.fromkeys(tried.method for setting in every for tried in setting.tried))
    colours: dict[str, tuple[str, Any]] = {}
    for method in sorted(methods, key=lambda method: method != "sgd"):
        colours[method] = free(method.partition("-")[0], list(colours.values()))
    most = max(len(setting.tried) for setting in every)
    rates = any(len(tried.rates) > 1 for setting in every for tried in setting.tried)
    timed = all(math.isfinite(tried.time) for setting in every for tried in setting.tried)
    height = max(3.2, 0.27 * most + 1.4)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(every), 2 + timed + rates, figsize=(WIDE, height * len(every)), squeeze=False, layout="constrained"
        )
        for setting, row in zip(every, axes, strict=True):
            _losses(row[0], setting, colours)
            if timed:
                _losses(row[1], setting, colours, over_time=True)
                row[1].sharey(row[0])
                row[1].tick_params(labelleft=False)
                row[1].set_ylabel("")
            _slow_downs(row[1 + timed], setting, colours)
            if rates:
                _rates(row[2 + timed], setting, colours)
            if setting.options:
                row[0].set_title(caption(setting.options))
    return figure


def _losses(ax: Axes, setting: Setting, colours: Colours, over_time: bool = False) -> None:
    """The loss over updates: the mean over the seeds, and a band from the least to the largest. over_time: over that of
    a pipeline, whose axis is logarithmic, since updates one by one take as many times as long as there are stages.
    """
    seen = []
    for tried in setting.tried:
        rows = [row for row in tried.finished if row.points]
        if not rows:
            continue
        places = sorted(set.intersection(*(set(row.points) for row in rows)))
        values = [[row.points[at] for row in rows] for at in places]
        places.append(max(row.updates for row in rows))
        values.append([row.train_loss for row in rows])
        colour, dash = colours[tried.method]
        means = [mean(v) for v in values]
        if over_time:
            places = [at * tried.time for at in places]
        ax.plot(places, means, color=colour, ls=dash, lw=1.7)
        if len(rows) > 1:
            ax.fill_between(places, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.12, lw=0)
        seen.append(means)
    if not seen:
        _instead(ax, f"No finished run has {POINTS[0]} updates,\nwith which a curve begins.")
        return
    _losses_up(ax, of_curves(seen, share=False, whole=True))
    if over_time:
        ax.set_xscale("log")
        ax.set(xlabel="time with a worker per stage", ylabel="training loss")
    else:
        ax.set_xlim(left=0)
        ax.set(xlabel="updates", ylabel="training loss")
        plain_numbers(ax)
    ax.grid(True, axis="y")


def _instead(ax: Axes, told: str) -> None:
    """Say why there is no panel."""
    ax.text(0.5, 0.5, told, color=INK, ha="center", va="center", transform=ax.transAxes)
    ax.set_axis_off()


def _losses_up(ax: Axes, scale: Scale | None) -> None:
    """Let the axis of losses show this range; where one diverges, on a logarithmic scale."""
    if scale is not None:
        ax.set_yscale("log" if scale.logarithmic else "linear")
        ax.set_ylim(scale.low, scale.high)
    if scale is not None and scale.logarithmic:
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())


def _slow_downs(ax: Axes, setting: Setting, colours: Colours) -> None:
    """The slow-down of every method, the least on top: a small dot per seed, and the median."""
    rows = setting.tried[::-1]
    largest = max((s for tried in rows for s in tried.slow_downs if math.isfinite(s)), default=1.0)
    for y, tried in enumerate(rows):
        colour, dash = colours[tried.method]
        values = [s for s in tried.slow_downs if math.isfinite(s)]
        if not values:
            told = "diverged" if not tried.finished else "–"
            ax.text(0.02, y, told, color=RED if told == "diverged" else INK, va="center",
                    transform=ax.get_yaxis_transform())  # fmt: skip
            continue
        ax.plot(values, [y] * len(values), "o", color=colour, ms=4, alpha=0.35, mew=0)
        if math.isfinite(tried.slow_down):
            ax.plot([tried.slow_down], [y], "o" if dash == "-" else "D", color=colour, ms=7)
            ax.text(1.02, y, f"{tried.slow_down:.2f}", va="center", color=INK, transform=ax.get_yaxis_transform())
    names(ax, [tried.method for tried in rows])
    for label, tried in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(colours[tried.method][0])
    ax.axvline(1, color="black", lw=0.9, ls=":", zorder=0)
    if largest > FAR:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(right=1.12 * max(1.0, largest))
    plain_numbers(ax)
    ax.set_xlabel("slow-down: updates for the same loss")


def _rates(ax: Axes, setting: Setting, colours: Colours) -> None:
    """The last loss over the rate; a ring marks the best rate."""
    seen, places = [], set[float]()
    for tried in setting.tried:
        points = sorted((float(rate), mean(end(row) for row in rows)) for rate, rows in _with_rate(tried))
        kept = [(rate, loss) for rate, loss in points if math.isfinite(loss)]
        if not kept:
            continue
        colour, dash = colours[tried.method]
        ax.plot(*zip(*kept, strict=True), color=colour, ls=dash, lw=1.4, marker="o", ms=3.5)
        best = mean(end(row) for row in tried.best)
        ax.plot([float(tried.rate)], [best], "o", mfc="none", mec=colour, ms=9, mew=1.4)
        seen.append([loss for _, loss in kept])
        places |= {rate for rate, _ in kept}
    if not seen:
        _instead(ax, "No finished run has logged\na training loss.")
        return
    _losses_up(ax, of_curves(seen, share=False, whole=True))
    ax.set_xscale("log")
    ax.set_xticks(sorted(places), [f"{rate:g}" for rate in sorted(places)], rotation=45, ha="right")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="learning rate", ylabel="training loss at the end")
    ax.grid(True, axis="y")


def _with_rate(tried: Tried) -> Sequence[tuple[str, Any]]:
    return [(rate, rows) for rate, rows in tried.rates.items() if rate]
