"""Bars: pictures with one bar per method: time to target, throughput and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib import pyplot as plt
from matplotlib.patheffects import withStroke

from pipeback.recipes.reports.metric import mean_and_deviation
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, Method, has
from pipeback.recipes.reports.style import INK, RED, Paint, grid, names, plain_numbers, ticks
from pipeback.recipes.reports.target import Target

Bar = tuple[str, str, Callable[[Method], Sequence[float]]]  # title, format, one number per seed


def draw_bars(methods: Sequence[Method], bars: Sequence[Bar], none: str, paint: Paint) -> plt.Figure:
    """Draw a panel of horizontal bars per measure, one bar per method; whiskers are one deviation.

    none: the text where a method has no number.
    """
    height = 0.26 * len(methods) + 0.95
    figure, axes = grid(len(bars), False, len(bars), height, sharey=True)
    for ax, (title, form, numbers) in zip(axes, bars, strict=True):
        found = [mean_and_deviation(some) if (some := numbers(m)) else None for m in methods]
        longest = max((mean + (deviation or 0.0) for mean, deviation in filter(None, found)), default=0.0) or 1.0
        for y, (m, pair) in enumerate(zip(methods, found, strict=True)):
            if pair is None:
                ax.text(0.01, y, none, color=RED, va="center", transform=ax.get_yaxis_transform())
                continue
            mean, deviation = pair[0], pair[1] or 0.0
            ax.barh(y, mean, height=0.62, color=paint[m], alpha=0.85)
            if deviation > 0.005 * longest:  # otherwise it would be a dot
                _, caps, (whisker,) = ax.errorbar(mean, y, xerr=deviation, color=INK, lw=1.1, capsize=2)
                for part in (*caps, whisker):
                    part.set_path_effects([withStroke(linewidth=2.4, foreground="white")])
            ax.annotate(format(mean, form), (mean + deviation, y), xytext=(5, 0), textcoords="offset points",
                        va="center", color=INK)  # fmt: skip
        ax.set_xlim(0, 1.28 * longest)
        ax.set_title(title)
        ax.xaxis.set_major_locator(ticks(4))
        plain_numbers(ax)
        names(ax, [m.label for m in methods])
        ax.invert_yaxis()
    return figure


def time_bars(methods: Sequence[Method], goal: Target) -> list[Bar]:
    """Return samples and seconds to the target, if any run logged them; steps if none logged samples."""
    told = any(has(run, SAMPLES) for m in methods for run in m.runs)
    found: list[Bar] = [
        ("samples" if told else "steps", ",.0f", lambda m: m.until(goal.value, SAMPLES if told else STEPS)),
        ("seconds of training", ",.3g", lambda m: m.until(goal.value, SECONDS)),
    ]
    return [bar for bar in found if any(bar[2](m) for m in methods)]


def cost_bars(methods: Sequence[Method]) -> list[Bar]:
    """Return throughput, weight copies, method state and activations, if they were logged and are not all zero."""
    found: list[Bar] = [
        ("samples / second", ",.0f", lambda m: m.rates),
        ("weight copies", ".3g", lambda m: m.number("pipeback/weight_copies")),
        ("method state, copies", ".3g", lambda m: m.number("pipeback/state_copies")),
        ("activations, MB", ".3g", lambda m: m.number("pipeback/activation_mb")),
    ]
    return [bar for bar in found if any(n > 0 for m in methods for n in bar[2](m))]
