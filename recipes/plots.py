"""The pictures of a report: accuracy over samples, the last epoch, and the kinds of schedule."""

from __future__ import annotations

import math
import statistics
from typing import Any

import matplotlib

from pipeback.draw import picture
from pipeback.recipes.runs import FAMILIES, KNOWN, REFERENCES, Method, spread
from pipeback.recipes.train import Record, build
from pipeback.timeline import bubble, timeline

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

# Okabe and Ito's colours, told apart by colour-blind readers; within a family no two methods share one
COLOURS = {
    "sgd": "#000000", "pb": "#8C8C8C",
    "sc": "#E69F00", "lwp": "#56B4E9", "cerebras": "#D55E00", "lwp_w_sc": "#009E73",
    "pipedream": "#0072B2", "spectrain": "#CC79A7", "pipemare": "#B8860B",
    "gpipe": "#0072B2", "one_f_one_b": "#E69F00", "pipedream_2bw": "#009E73",
}  # fmt: skip
SPARE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {"font.family": "DejaVu Sans", "figure.dpi": 110, "savefig.dpi": 150, "savefig.bbox": "tight"}


def colours(methods: list[Method]) -> dict[str, str]:
    """Of the methods without their slack, the same in every picture; those of no known family take what is spare."""
    others = dict.fromkeys(m.base for m in methods if m.base not in COLOURS)
    return COLOURS | {base: SPARE[n % len(SPARE)] for n, base in enumerate(others)}


def panels(methods: list[Method]) -> dict[str, list[Method]]:
    """Title -> methods at their own delay; those of no known family get a panel of their own."""
    own = [m for m in methods if not m.equal_slack]
    found = {title: [m for m in own if m.label in family] for title, family in FAMILIES.items()}
    found["Other methods"] = [m for m in own if m.label not in KNOWN]
    return {title: panel for title, panel in found.items() if panel} or {"": []}


def draw_accuracy(methods: list[Method]) -> plt.Figure:
    """Accuracy over samples seen: a panel a family, sgd and pb in each, the band from the worst seed to the best."""
    shown, paint = panels(methods), colours(methods)
    across = 2 if len(shown) == 4 else len(shown)
    down = len(shown) // across
    size = (3.7 * across + 0.5 if across > 1 else 6.5, 4.4 * down)
    figure, axes = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False, layout="constrained")
    references = [m for m in methods if m.label in REFERENCES]
    lowest = 1.0
    for ax, (title, panel) in zip(axes.flat, shown.items(), strict=True):
        for m in [*references, *panel]:
            lowest = min(lowest, _curve(ax, m, paint[m.base]))
        for n, m in enumerate(m for m in reversed([*references, *panel]) if m.fate):
            text = f"{m.label}: {m.fate}"
            ax.text(0.98, 0.03 + 0.06 * n, text, color=paint[m.base], ha="right", transform=ax.transAxes)
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_xlabel("samples seen")
        if ax.lines:
            ax.legend(loc="upper left", bbox_to_anchor=(-0.03, -0.14), ncols=3, frameon=False, fontsize=9.5,
                      handlelength=1.4, columnspacing=1.2)  # fmt: skip
        for epoch in range(1, methods[0].epochs + 1):
            ax.axvline(epoch * methods[0].head["epoch_samples"], color="#BBBBBB", lw=0.8, ls=":", zorder=0)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        ax.set_xlim(left=0)
        _tidy(ax)
    axes[0][0].set_ylim(math.floor(10 * lowest) / 10 if lowest < 1 else 0.0, 1.0)
    axes[0][0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for ax in axes[:, 0]:
        ax.set_ylabel("held-out accuracy")
    return figure


def _curve(ax: Axes, m: Method, line: str) -> float:
    """Draws it. Returns the lowest accuracy that the axis is to show: not of the first steps, nor of what failed."""
    seen, values = m.curve()
    if not seen:
        return 1.0
    mean = [statistics.fmean(v) for v in values]
    dash: Any = (0, (4, 2)) if m.label == "one_f_one_b" else "-"  # it runs over gpipe, which is to show through
    ax.plot(seen, mean, color=line, lw=1.6 if m.label in REFERENCES else 2.0, ls=dash, label=m.label)
    if m.fate:
        return 1.0
    if any(len(v) > 1 for v in values):
        ax.fill_between(seen, [min(v) for v in values], [max(v) for v in values], color=line, alpha=0.13, lw=0)
    return min(a for a, at in zip(mean, seen, strict=True) if at >= 500 or at == seen[-1])


def draw_final(methods: list[Method]) -> plt.Figure:
    """From the accuracy after the first epoch (ring) to the last (dot), best first; whiskers are one deviation."""
    paint, epochs = colours(methods), max(m.epochs for m in methods)
    kept = [m for m in methods if m.after(m.epochs) and not m.fate]
    kept.sort(key=lambda m: statistics.fmean(m.after(m.epochs)))
    rows = [m for m in methods if m not in kept] + kept
    figure, ax = plt.subplots(figsize=(8.6, 0.34 * len(rows) + 1.5), layout="constrained")
    for y, m in enumerate(rows):
        if m not in kept:
            ax.text(0.01, y, m.fate or "unfinished", color="#B00020", va="center", transform=ax.get_yaxis_transform())
            continue
        line, last, first = paint[m.base], m.after(m.epochs), m.after(1)
        mean = statistics.fmean(last)
        if first and m.epochs > 1:
            start = statistics.fmean(first)
            ax.plot([start, mean], [y, y], color=line, lw=2.5, alpha=0.35, solid_capstyle="butt")
            ax.plot(start, y, "o", mfc="white", mec=line, mew=1.6, ms=6.5)
        deviation = statistics.stdev(last) if len(last) > 1 else None
        ax.errorbar(mean, y, xerr=deviation, fmt="o", color=line, ms=7.5, capsize=3, lw=1.3)
        text = spread(last, ".1f", 100) + " %" + (f", {m.diverged} of {len(m.results)} diverged" if m.diverged else "")
        ax.text(1.02, y, text, va="center", fontsize=9.5, transform=ax.get_yaxis_transform())
        if m.label == "sgd":
            ax.axvline(mean, color="black", lw=0.9, ls=":", zorder=0)
    ax.set_yticks(range(len(rows)), [m.label for m in rows])
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylim(-0.6, len(rows) - 0.4)
    after = "after epoch 1 (ring) and " if epochs > 1 else ""
    ax.set_xlabel(f"held-out accuracy {after}after epoch {epochs} (dot and number)")
    _tidy(ax, grid="x")
    return figure


def _tidy(ax: Axes, grid: str = "y") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="#E5E5E5", lw=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)


STAGES, MICRO_BATCHES = 4, 8  # small enough to draw
SHAPES = {  # one method of each kind of schedule
    "gpipe": "gpipe: fill, drain, update",
    "one_f_one_b": "one_f_one_b: early backwards, the same bubble",
    "pipedream": "slack 1 (pipedream, spectrain): never flushed, D = S − 1 − s",
    "pb": "slack 2 (pb, sc, lwp, cerebras, pipemare): never flushed, D = 2(S − 1 − s)",
}


def schedules() -> list[tuple[str, Any]]:
    """Title and schedule of each kind; flushes of as many micro-batches as there are stages."""
    options: dict[str, Record] = {name: {"micro_batches": STAGES} for name in ("gpipe", "one_f_one_b")}
    return [(title, build({"name": name, **options.get(name, {})}).schedule) for name, title in SHAPES.items()]


def draw_schedules() -> plt.Figure:
    found = schedules()
    figure, axes = plt.subplots(len(found), 1, figsize=(10, 1.75 * len(found) + 0.4), squeeze=False)
    timelines = [list(timeline(schedule, STAGES, MICRO_BATCHES)) for _, schedule in found]
    span = max(float(slot.end) for slots in timelines for slot in slots)
    for n, (ax, (title, _), slots) in enumerate(zip(axes[:, 0], found, timelines, strict=True)):
        picture(slots, ax=ax, until=span)
        ax.set_title(f"{title}   (bubble here {bubble(slots):.0%})", fontsize=10.5, loc="left")
        ax.set_xlabel("")
        ax.set_xticks(range(0, int(span) + 1, 4))
        if n and (legend := ax.get_legend()):
            legend.remove()  # one for all
    axes[-1, 0].set_xlabel("time, in forwards")
    figure.tight_layout()
    return figure
