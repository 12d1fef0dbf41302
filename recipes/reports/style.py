"""Style: colours, panels and letters of the pictures of a report. Each picture is drawn wide and narrow.

Wide pictures put panels side by side, for a desktop; narrow ones stack them, for a telephone, at the same letter size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib

from pipeback.recipes.reports.runs import FAMILIES, KNOWN, REFERENCES, Method

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # after the backend is chosen
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

WIDE, NARROW = 11.2, 4.0  # inches: the widths of the page's text and of a telephone
# Okabe and Ito's colours, which colour-blind readers can distinguish; methods of one family differ in colour
COLOURS = {
    "sgd": "#000000", "pb": "#8C8C8C",
    "sc": "#E69F00", "lwp": "#56B4E9", "lwp_w": "#0072B2", "cerebras": "#D55E00", "lwp_w_sc": "#009E73",
    "pipedream": "#0072B2", "spectrain": "#CC79A7", "pipemare": "#B8860B",
    "gpipe": "#009E73", "one_f_one_b": "#E69F00", "pipedream_2bw": "#0072B2", "zb_h1": "#CC79A7", "zb_h2": "#56B4E9",
    "pipeoptim": "#56B4E9", "xpipe": "#0072B2", "msnag": "#009E73", "ef": "#D55E00",
    "gap_aware": "#0072B2", "dc_asgd": "#56B4E9", "dc_asgd_a": "#CC79A7", "braking": "#E69F00",
    "staleness_lr": "#B8860B", "eigendelay": "#D55E00",
}  # fmt: skip
SPARE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))  # used when all colours are taken
RED, INK = "#B00020", "#333B45"
SIZE = 9.8  # points, of all letters: 13 pixels on the page, as its tables have
DARK, LEGIBLE = "#14181d", 4.5  # the dark page, and the least contrast of a line there
STYLE = {"font.family": "DejaVu Sans", "font.size": SIZE, "axes.titlesize": SIZE, "axes.titlelocation": "left",
         "axes.labelsize": SIZE, "xtick.labelsize": SIZE, "ytick.labelsize": SIZE, "legend.fontsize": SIZE,
         "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8A939E", "axes.labelcolor": INK,
         "xtick.color": INK, "ytick.color": INK, "xtick.major.size": 3, "ytick.major.size": 3,
         "axes.axisbelow": True, "grid.color": "#E6E9ED", "grid.linewidth": 0.8, "savefig.dpi": 150}  # fmt: skip
ON_DARK = {"figure.facecolor": DARK, "axes.facecolor": DARK, "savefig.facecolor": DARK, "axes.edgecolor": "#6b7682",
           "text.color": "#e4e8ec", "axes.labelcolor": "#b6c0ca", "xtick.color": "#b6c0ca", "ytick.color": "#b6c0ca",
           "grid.color": "#282f37"}  # fmt: skip
TOGETHER = 7  # the most methods that share one panel


class Paint:
    """The colour and dash of every method, the same in every picture; methods of one panel differ in one of them."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.shown = panels(methods)
        self.of: dict[str, tuple[str, Any]] = {}
        for panel in self.shown.values():
            for m in panel:
                if m.label not in self.of:
                    self.of[m.label] = free(m.base, [self.of[o.label] for o in panel if o.label in self.of])
        for m in methods:
            self.of.setdefault(m.label, (COLOURS.get(m.base, SPARE[0]), "-"))

    def __getitem__(self, method: Method) -> str:
        return self.of[method.label][0]

    def name(self, method: Method) -> str:
        """Return the class of the method's colour on the page."""
        return f"c{list(self.of).index(method.label)}"

    def dashes(self, method: Method) -> str:
        """Return the method's dashes on the page, in pixels; "" for a line without gaps."""
        dash = self.of[method.label][1]
        if method.label == "one_f_one_b":
            dash = DASHES[1]  # dashed, so that gpipe below it stays visible
        return "" if dash == "-" else " ".join(f"{2 * part:g}" for part in dash[1])

    @property
    def scheme(self) -> dict[str, tuple[str, str]]:
        """The colours of the page: class -> on white, on dark."""
        return {f"c{n}": (colour, on_dark(colour)) for n, (colour, _) in enumerate(self.of.values())}


def free(base: str, taken: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
    """Return a method's own colour if it is free, else a free one, else one with other dashes. taken: of others."""
    own = COLOURS.get(base)
    for dash in DASHES:
        for colour in filter(None, (own, *SPARE)):
            if (colour, dash) not in taken and (dash != "-" or all(colour != other for other, _ in taken)):
                return colour, dash
    return own or SPARE[0], "-"


def on_dark(colour: str) -> str:
    """Return the colour, or one that is lighter until a line of it can be told from the dark page; black is white."""
    if colour == "#000000":
        return "#FFFFFF"
    while contrast(colour, DARK) < LEGIBLE:
        parts = [int(colour[n : n + 2], 16) for n in (1, 3, 5)]
        colour = "#" + "".join(f"{part + max(1, (255 - part) // 16):02X}" for part in parts)
    return colour


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, from 1 to 21; lines need 3, small letters 4.5."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def panels(methods: Sequence[Method]) -> dict[str, list[Method]]:
    """Return title -> methods: one panel for a few methods, else a panel per family; references are in every panel."""
    if len(methods) <= TOGETHER:
        return {"": list(methods)}
    own = [m for m in methods if not m.equal_slack]
    references = [m for m in own if m.base in REFERENCES and m.base == m.label]
    rest = [m for m in own if m not in references]
    found = {title: [m for m in rest if m.base in family] for title, family in FAMILIES.items()}
    found["Other methods"] = [m for m in rest if m.base not in KNOWN or m.base in REFERENCES]
    found["At equal delay (slack 2)"] = [m for m in methods if m.equal_slack]
    return {title: [*references, *panel] for title, panel in found.items() if panel} or {"": references}


def grid(count: int, narrow: bool, across: int, height: float, **options: Any) -> tuple[plt.Figure, list[Axes]]:
    """Return a figure with `count` panels, `across` side by side, or one above the other if it is narrow."""
    across = 1 if narrow else min(across, count)
    down = math.ceil(count / across)
    size = (NARROW if narrow else WIDE, height * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained", **options)
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    for ax in axes.flat[count:]:
        ax.remove()
    return figure, list(axes.flat[:count])


def ticks(most: int) -> MaxNLocator:
    """Return a locator of at most `most` ticks at round numbers."""
    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])


def names(ax: Axes, labels: Sequence[str]) -> None:
    """Label a row per method."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(-0.6, len(labels) - 0.4)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")


def plain_numbers(ax: Axes) -> None:
    """Write numbers on the x axis as 1,000 and 0.25, without powers."""
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
