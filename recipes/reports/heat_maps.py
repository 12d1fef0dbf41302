"""Heat maps: pictures of stage by step, one panel per method, of the staleness in updates and as a distance.

The numbers are those of PipelineMonitor: pipeback/delay/stage_03, pipeback/gap/stage_03, ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeback.recipes.reports.runs import Method
from pipeback.recipes.reports.style import NARROW, WIDE

TITLES = {"gap": "‖w now − w used‖", "delay": "delay, updates"}
MOST = 16  # the most panels of a picture


class Field(NamedTuple):
    """steps: (T,). values: (stages, T), means over seeds; NaN where nothing was logged."""

    steps: np.ndarray
    values: np.ndarray
    unstable: bool = False  # whether its weights diverged


def field(method: Method, kind: str) -> Field | None:
    """Return the values of this kind that the method's runs logged per stage; None if they did not."""
    pattern = re.compile(rf"pipeback/{kind}/stage_(\d+)$")
    cells: dict[tuple[int, float], list[float]] = {}
    for run in method.runs:
        for column in run.columns:
            if found := pattern.match(column):
                for step, value in run.values(column):
                    cells.setdefault((int(found[1]), step), []).append(value)
    if not cells:
        return None
    stages, steps = 1 + max(stage for stage, _ in cells), sorted({step for _, step in cells})
    values = np.full((stages, len(steps)), np.nan)
    place = {step: n for n, step in enumerate(steps)}
    for (stage, step), some in cells.items():
        finite = [value for value in some if np.isfinite(value)]
        values[stage, place[step]] = np.mean(finite) if finite else np.nan
    return Field(np.array(steps), values, method.unstable)


def fields(methods: Sequence[Method], kind: str) -> tuple[dict[str, Field], list[str]]:
    """Return the fields of methods that logged this kind, and the labels of those without staleness."""
    found = {m.label: f for m in methods if (f := field(m, kind)) is not None}
    fresh = [label for label, f in found.items() if not np.nanmax(np.nan_to_num(f.values), initial=0.0) > 0]
    return {label: f for label, f in found.items() if label not in fresh}, fresh


def draw_fields(found: dict[str, Field], kind: str, narrow: bool) -> plt.Figure:
    """Draw all panels with one colour scale, that of the stable methods; zero (no staleness) is left blank."""
    shown = dict(list(found.items())[:MOST])
    across = min(2 if narrow else 4 if len(shown) > 6 or len(shown) == 4 else 3, len(shown))
    down = -(-len(shown) // across)
    width = NARROW if narrow else WIDE if across > 1 else 0.6 * WIDE
    figure, axes = plt.subplots(
        down, across, figsize=(width, (1.75 if narrow else 2.1) * down + 0.75), squeeze=False, layout="constrained",
        sharey=True,
    )  # fmt: skip
    for ax in axes.flat[len(shown) :]:
        ax.remove()
    every = list(shown.values())
    positive = np.concatenate([f.values[f.values > 0] for f in [f for f in every if not f.unstable] or every])
    beyond = max(float(np.nanmax(f.values)) for f in every) > positive.max()
    norm: Normalize
    if kind == "gap" and positive.max() > 20 * positive.min():
        norm = LogNorm(max(positive.min(), positive.max() / 1e3), positive.max())
    else:
        norm = Normalize(0, positive.max())
    colours = plt.get_cmap("viridis").with_extremes(bad=plt.rcParams["axes.facecolor"])
    for n, (ax, (label, f)) in enumerate(zip(axes.flat, shown.items(), strict=False)):
        values = np.ma.masked_invalid(np.where(f.values > 0, f.values, np.nan))
        mesh = ax.pcolormesh(edges(f.steps), np.arange(len(values) + 1) - 0.5, values, norm=norm, cmap=colours,
                             rasterized=True)  # fmt: skip
        ax.invert_yaxis() if n == 0 else None  # the axis is shared, so this is done once
        ax.set_title(label)
        ax.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if n + across >= len(shown):
            ax.set_xlabel("step")
        if n % across == 0:
            ax.set_ylabel("stage")
    place: dict[str, Any] = {"location": "top", "shrink": 0.9} if narrow else {"location": "right", "shrink": 0.8}
    bar = figure.colorbar(
        mesh, ax=list(axes.flat[: len(shown)]), aspect=30, pad=0.02, extend="max" if beyond else "neither", **place
    )
    bar.set_label(f"{TITLES[kind]} (an unstable method's beyond it)" if beyond else TITLES[kind])
    bar.outline.set_visible(False)
    return figure


def edges(steps: np.ndarray) -> np.ndarray:
    """Return the edges of the cells of these steps, half-way to each neighbour."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])
