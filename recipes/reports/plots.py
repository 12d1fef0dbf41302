"""Plots: pictures of held-out values: curves over samples, steps or seconds, and final values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from pipeback.recipes.reports.metric import mean_and_deviation, spread
from pipeback.recipes.reports.runs import REFERENCES, SAMPLES, SECONDS, STEPS, Method
from pipeback.recipes.reports.style import DASHES, INK, NARROW, RED, WIDE, Paint, grid, names, plain_numbers, ticks

AXES = {SAMPLES: "samples seen", STEPS: "steps (batches)", SECONDS: "training time, seconds"}


def draw_curves(methods: Sequence[Method], axis: str, paint: Paint, narrow: bool) -> plt.Figure:
    """Draw the metric over samples, steps or seconds: means over seeds, with a band from the worst seed to the best."""
    shown, metric = paint.shown, methods[0].metric
    across = 2 if len(shown) in (2, 4) else 3
    height = 3.9 if narrow else 4.0 if len(shown) == 1 else 3.9
    figure, axes = grid(len(shown), narrow, across, height, sharey=True)
    seen: list[float] = []
    for ax, (title, panel) in zip(axes, shown.items(), strict=True):
        for m in panel:
            seen += _curve(ax, m, axis, paint)
        failed = [m for m in panel if m.fate]
        for n, m in enumerate(reversed(failed)):
            ax.text(0.98, 0.03 + 0.07 * n, f"{m.label}: {m.fate}", color=paint[m], ha="right", transform=ax.transAxes,
                    bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
        ax.set_title(title)
        ax.set_xlabel(AXES[axis])
        ax.set_xlim(left=0)
        plain_numbers(ax)
        ax.xaxis.set_major_locator(ticks(5 if narrow or len(shown) > 1 else 9))
        ax.grid(True, axis="y")
        ax.tick_params(labelleft=True)
        _legend(ax, panel, beside=len(shown) == 1 and not narrow, width=NARROW if narrow else WIDE / across)
    _limits(axes[0], metric.share, seen)
    for n, ax in enumerate(axes):
        if narrow or n % across == 0:
            ax.set_ylabel(metric.held_out)
    return figure


def _legend(ax: Axes, panel: Sequence[Method], beside: bool, width: float) -> None:
    """Draw the legend beside a single wide panel, or else below, in as many columns as fit. width: inches."""
    if not ax.lines:
        return
    if beside:
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=1.8)
        return
    longest = 0.075 * max(len(m.label) for m in panel) + 0.45  # inches, of the letters and of the line before them
    ax.legend(loc="upper left", bbox_to_anchor=(-0.04, -0.15), ncols=max(1, min(4, int((width - 0.4) / longest))),
              frameon=False, handlelength=1.6, columnspacing=1.1, borderaxespad=0.2)  # fmt: skip


def _curve(ax: Axes, m: Method, axis: str, paint: Paint) -> list[float]:
    """Draw a curve. Return the means that the y axis must show, without those of first steps and failed runs."""
    curve = m.curve(axis)
    if not curve.x:
        return []
    colour, dash = paint.of[m.label]
    if m.label == "one_f_one_b":
        dash = DASHES[1]  # dashed, so that gpipe below it stays visible
    mean = curve.mean
    marker = "o" if len(curve.x) < 4 else None
    ax.plot(curve.x, mean, color=colour, ls=dash, lw=1.5 if m.base in REFERENCES else 1.9, label=m.label, marker=marker)
    if m.fate:
        return []
    if any(len(v) > 1 for v in curve.values):
        ax.fill_between(curve.x, [min(v) for v in curve.values], [max(v) for v in curve.values],
                        color=colour, alpha=0.12, lw=0)  # fmt: skip
    return mean[len(mean) // 5 :]  # by the number of measurements, so that all three pictures show the same range


def _limits(ax: Axes, share: bool, seen: Sequence[float]) -> None:
    if not seen:
        return
    low, high = min(seen), max(seen)
    if share:
        top = min(1.0, math.ceil(10 * high + 0.2) / 10)
        ax.set_ylim(max(0.0, min(math.floor(10 * low) / 10, top - 0.1)), top)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif low > 0 and high > 8 * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.15, high * 1.15)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    else:
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        ax.set_ylim(low - room, high + room)


def draw_final(methods: Sequence[Method], paint: Paint, narrow: bool) -> plt.Figure:
    """Draw the last held-out values, best first: a small dot per seed, their mean, and one deviation each way."""
    metric = methods[0].metric
    kept = [m for m in methods if m.finals and not m.fate]
    kept.sort(key=lambda m: metric.ahead(mean_and_deviation(m.finals)[0]), reverse=True)
    rows = [*(m for m in methods if m not in kept), *kept]
    figure, ax = plt.subplots(figsize=(NARROW if narrow else 0.8 * WIDE, 0.3 * len(rows) + 1.0), layout="constrained")
    for y, m in enumerate(rows):
        failed = f", {sum(m.diverged)} of {len(m.runs)} diverged" if any(m.diverged) else ""
        if m not in kept:
            ax.text(0.01, y, m.fate or "unfinished", color=RED, va="center", transform=ax.get_yaxis_transform())
            continue
        mean, deviation = mean_and_deviation(m.finals)
        if len(m.finals) > 1:
            ax.plot(m.finals, [y] * len(m.finals), "o", color=paint[m], ms=4, alpha=0.35, mew=0)
        ax.errorbar(mean, y, xerr=deviation, fmt="o", color=paint[m], ms=7, capsize=3, lw=1.4)
        text = spread(m.finals, metric.form, metric.scale) + metric.unit
        ax.text(1.02, y, text if narrow else text + failed, va="center", color=RED if failed else INK, fontsize=9,
                transform=ax.get_yaxis_transform())  # fmt: skip
        if m.label == "sgd":
            ax.axvline(mean, color="black", lw=0.9, ls=":", zorder=0)
    names(ax, [m.label for m in rows])
    if metric.share:
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        low, high = ax.get_xlim()
        ax.set_xlim(max(low, -0.02), min(high, 1.02))
    ax.xaxis.set_major_locator(ticks(5))
    ax.set_xlabel(f"{metric.held_out} at the end")
    return figure
