"""Plots: pictures of held-out values: curves over samples, steps or seconds, and final values."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from pipeback.recipes.reports.charts import AXES, written
from pipeback.recipes.reports.histories import History
from pipeback.recipes.reports.metric import mean_and_deviation, spread
from pipeback.recipes.reports.runs import REFERENCES, Curve, Method
from pipeback.recipes.reports.scales import of_curves
from pipeback.recipes.reports.style import DASHES, INK, RED, WIDE, Paint, grid, names, plain_numbers, ticks


def draw_curves(methods: Sequence[Method], history: History, axis: str, paint: Paint) -> plt.Figure:
    """Draw a history over samples, steps or seconds: means over seeds, with a band from the worst seed to the best."""
    shown = paint.shown
    across = 2 if len(shown) in (2, 4) else 3
    figure, axes = grid(len(shown), False, across, 4.0 if len(shown) == 1 else 3.9, sharey=True)
    seen: list[list[float]] = []
    for ax, (title, panel) in zip(axes, shown.items(), strict=True):
        for m in panel:
            seen += _curve(ax, m, history.curve(m, axis), paint)
        failed = [m for m in panel if m.fate]
        for n, m in enumerate(reversed(failed)):
            ax.text(0.98, 0.03 + 0.07 * n, f"{m.label}: {m.fate}", color=paint[m], ha="right", transform=ax.transAxes,
                    bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
        ax.set_title(title)
        ax.set_xlabel(AXES[axis])
        ax.set_xlim(left=0)
        plain_numbers(ax)
        ax.xaxis.set_major_locator(ticks(5 if len(shown) > 1 else 9))
        ax.grid(True, axis="y")
        ax.tick_params(labelleft=True)
        _legend(ax, panel, beside=len(shown) == 1, width=WIDE / across)
    if (up := of_curves(seen, history.share, history.whole)) is not None:
        axes[0].set_yscale("log" if up.logarithmic else "linear")
        axes[0].set_ylim(up.low, up.high)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: written(y, history.share)))
    for ax in axes[::across]:
        ax.set_ylabel(history.label)
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


def _curve(ax: Axes, m: Method, curve: Curve, paint: Paint) -> list[list[float]]:
    """Draw a curve. Return the means that the y axis must show: none of a failed run's."""
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
    return [mean]


def draw_final(methods: Sequence[Method], paint: Paint) -> plt.Figure:
    """Draw the last held-out values, best first: a small dot per seed, their mean, and one deviation each way."""
    metric = methods[0].metric
    kept = [m for m in methods if m.finals and not m.fate]
    kept.sort(key=lambda m: metric.ahead(mean_and_deviation(m.finals)[0]), reverse=True)
    rows = [*(m for m in methods if m not in kept), *kept]
    figure, ax = plt.subplots(figsize=(0.8 * WIDE, 0.3 * len(rows) + 1.0), layout="constrained")
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
        ax.text(1.02, y, text + failed, va="center", color=RED if failed else INK,
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
