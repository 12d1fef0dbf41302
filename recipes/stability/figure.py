"""The picture of limits: ηλ over the delay for several momenta, and every method over `pb`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from pipeback.recipes.reports.style import COLOURS, INK, STYLE, WIDE, free, plain_numbers, plt
from pipeback.recipes.stability.limits import EXPERIMENTS, Limits
from pipeback.recipes.stability.polynomials import LAWS

LONGEST = 256  # delay of the lines
NEAR_ONE = 0.995  # the momentum of the lines on the right, where D(1 − m) alone matters
SHORTER = {
    "experiment=digits": "digits, Fashion-MNIST",
    "experiment=cifar10": "CIFAR-10",
    "Kosson et al., ResNet-20": "ResNet-20",
    "Kosson et al., ResNet-110": "ResNet-110",
}


def draw(limits: Limits) -> plt.Figure:
    """Draw theory as lines and what was observed as dots."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 4.6), layout="constrained")
        _over_delay(left, limits)
        _over_pb(right, limits)
    return figure


def _over_delay(ax: Axes, limits: Limits) -> None:
    delays = np.unique(np.geomspace(1, LONGEST, 24).round().astype(int))
    for method in ("pb", "cerebras"):
        for m in sorted({row.momentum for row in limits.rows}):
            line = [LAWS[method].largest(m, int(d)) for d in delays]
            ax.plot(delays, line, color=COLOURS[method], lw=1.6)
            dots = [(row.delay, row.limit) for row in limits.rows if row.method == method and row.momentum == m]
            ax.plot(*zip(*dots, strict=True), "o", color=COLOURS[method], ms=5)
            if method == "pb":
                ax.annotate(f"m = {m:g}", (delays[-1], line[-1]), (5, -3), textcoords="offset points", color=INK)
    ax.plot([], [], "-o", color=COLOURS["pb"], ms=5, label="pb")
    ax.plot([], [], "-o", color=COLOURS["cerebras"], ms=5, label="cerebras")
    ax.legend(frameon=False, loc="upper right")
    ax.set(xscale="log", yscale="log", xlabel="delay D, in updates", ylabel="largest stable ηλ",
           title="Lines: theory. Dots: a quadratic, trained")  # fmt: skip
    ax.set_xlim(right=1200)
    ax.xaxis.set_major_locator(FixedLocator([1, 4, 16, 64, 256]))
    ax.xaxis.set_minor_formatter(NullFormatter())
    plain_numbers(ax)
    ax.grid(True)


def _over_pb(ax: Axes, limits: Limits) -> None:
    methods = [m for m in dict.fromkeys(row.method for row in limits.rows) if m != "pb"]
    delays = np.unique(np.geomspace(4, 1400, 24).round().astype(int))
    plain = [LAWS["pb"].largest(NEAR_ONE, int(d)) for d in delays]
    used: list[tuple[str, Any]] = []
    for law in dict.fromkeys(LAWS[method] for method in methods if method in LAWS):
        alike = [method for method in methods if LAWS.get(method) == law]  # these have the same limits
        used.append(free(alike[0], used))
        colour = used[-1][0]
        line = [law.largest(NEAR_ONE, int(d)) / p for d, p in zip(delays, plain, strict=True)]
        ax.plot(delays * (1 - NEAR_ONE), line, color=colour, lw=1.6)
        ax.plot(*_dots(limits, alike), "o", color=colour, ms=5, label=" and ".join(alike))
    for method, marker in zip((method for method in methods if method not in LAWS), cycle("Ds^v"), strict=False):
        ax.plot(*_dots(limits, [method]), marker, color=INK, mfc="none", ms=7, label=f"{method} (observed only)")
    ax.axhline(1, color="black", lw=0.9, ls=":")
    ax.set(xscale="log", yscale="log", xlabel="D(1 − m)", ylabel="largest stable ηλ, over that of pb",
           title="Above 1 a method helps", ylim=(0.4, 40), xlim=(0.02, 8))  # fmt: skip
    for some in EXPERIMENTS:
        if some.name in SHORTER:
            at = some.delay * (1 - some.scaled[1])
            ax.axvline(at, color="#8A939E", lw=0.9, ls=(0, (2, 2)), zorder=0)
            beside = 1 if "110" in some.name else -1  # so that neighbours do not hide each other
            ax.annotate(SHORTER[some.name], (at, 0.42), (3 * beside, 2), textcoords="offset points", rotation=90,
                        ha="left" if beside > 0 else "right", va="bottom", color=INK, size=8.5)  # fmt: skip
    ax.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    plain_numbers(ax)
    ax.grid(True)
    ax.legend(frameon=False, loc="upper right")


def _dots(limits: Limits, methods: Sequence[str]) -> tuple[list[float], list[float]]:
    """D(1 − m) and the limit over that of pb, of every row of these methods."""
    rows = [row for row in limits.rows if row.method in methods]
    return [row.delay * (1 - row.momentum) for row in rows], [limits.over_pb(row) for row in rows]
