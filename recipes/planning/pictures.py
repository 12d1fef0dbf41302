"""Pictures of a plan, drawn by matplotlib: the timeline of a step, and one figure of everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt  # after the backend is chosen
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from pipeback.draw.figures import picture
from pipeback.planner.estimates import Estimate
from pipeback.planner.found import Found
from pipeback.planner.hardware import device
from pipeback.planner.search import Question
from pipeback.planner.windows import Window, lines
from pipeback.planner.windows import window as window_of
from pipeback.recipes.planning import charts
from pipeback.recipes.planning.charts import Stacks
from pipeback.recipes.reports.charts import Chart
from pipeback.recipes.reports.style import INK, NARROW, RED, SIZE, STYLE, WIDE
from pipeback.schedules.timeline import Slot

BOXES = 90  # of the busiest worker, that a timeline shows
ROWS = 32  # workers that a timeline shows
TICKS, LABELLED = 22, 38  # points that marks below axes take, and marks with a label
UPDATE = "#9a86c4"
WORDS = ("forward", "backward", "gradient of the input", "gradient of the weights", "update")  # in this order


def piped(found: Found, most: int = 3) -> list[Estimate]:
    """The best options that have a pipeline, no two of one method."""
    return [one for one in charts.chosen(found) if one.option.pipeline > 1][:most]


def timelines(some: Sequence[Estimate], narrow: bool = False) -> plt.Figure:
    """A step of each option, on time axes of their own."""
    heights = [0.13 * min(ROWS, one.option.pipeline) + 0.9 for one in some]
    size = (NARROW, sum(heights) + 0.7) if narrow else (WIDE, sum(heights) + 0.3)
    figure, axes = plt.subplots(
        len(some), 1, figsize=size, layout="constrained", squeeze=False, height_ratios=heights
    )  # fmt: skip
    kinds: dict[str, Artist] = {}
    for ax, one in zip(axes[:, 0], some, strict=True):
        kinds |= timeline(one, ax)
    key(figure, kinds, 2 if narrow else len(WORDS))
    return figure


def key(figure: Any, kinds: dict[str, Artist], columns: int) -> None:
    """What the colours mean, below."""
    some = {name: kinds[name] for name in WORDS if name in kinds}
    figure.legend(
        some.values(), some, loc="outside lower left", ncols=columns, frameon=False, fontsize=SIZE, handlelength=1.4
    )


def timeline(one: Estimate, ax: Axes) -> dict[str, Artist]:
    """The beginning of a step of an option's pipeline, a row per worker. Returns what the colours mean."""
    option = one.option
    slots = [slot._replace(stage=option.technique.worker(slot.stage, option.pipeline)) for slot in one.timeline()]
    slots = [slot for slot in slots if slot.stage < ROWS]
    mine = sorted(slot.end for slot in slots if slot.stage == 0)
    all_fit = len(mine) <= BOXES
    end = float(max(slot.end for slot in slots) if all_fit else mine[BOXES - 1])
    in_ms = [Slot(1e3 * s.start, 1e3 * min(s.end, end), s.stage, s.op) for s in slots if s.start < end]
    picture(in_ms, ax, until=1e3 * end)
    whole = "" if all_fit else f", the first {1e3 * end:,.0f} ms"
    ax.set_title(f"{charts.told(one)}: bubble {one.bubble:.1%}{whole}", fontsize=SIZE, loc="left")
    ax.set_xlabel("milliseconds", fontsize=SIZE)
    ax.set_ylabel("worker", fontsize=SIZE)
    kinds: dict[str, Artist] = {}
    if legend := ax.get_legend():
        pairs = zip(legend.get_texts(), legend.legend_handles, strict=True)
        kinds = {text.get_text(): handle for text, handle in pairs if handle is not None}
        legend.remove()
    return kinds | updates(in_ms, ax)


def updates(slots: Sequence[Slot], ax: Axes) -> dict[str, Artist]:
    """Draw U, which takes time here: gradients among replicas, and the optimizer step."""
    some = [slot for slot in slots if slot.op.kind == "U" and slot.end > slot.start]
    if not some:
        return {}
    ax.barh([s.stage for s in some], [float(s.end - s.start) for s in some], left=[float(s.start) for s in some],
            height=0.86, color=UPDATE, edgecolor=plt.rcParams["axes.facecolor"], linewidth=0.8)  # fmt: skip
    return {"update": Patch(color=UPDATE)}


def windows(found: Found) -> list[Window]:
    """The batch window of the model on its device, and on one whose host link is fast."""
    job = found.job
    names = list(dict.fromkeys((job.cluster.device.name, "GH200")))
    kinds = [job.cluster.device, *(device(name) for name in names if name != job.cluster.device.name)]
    return [window_of(job.model, kind) for kind in kinds]


def whole(found: Found, asking: Question) -> plt.Figure:
    """Memory, time, timelines, devices over days, and windows as one figure."""
    with plt.rc_context(STYLE):
        some = piped(found)
        bars = [charts.memory(found), charts.shares(found)]
        curves = [
            charts.frontier(found.frontier(), asking.price),
            *(charts.window(w, lines(w)) for w in windows(found)[:1]),
        ]
        each = [0.13 * min(ROWS, one.option.pipeline) + 0.9 for one in some]
        each[-1:] = [height + 0.35 for height in each[-1:]]  # for the key
        heights = [0.42 * len(bars[0].rows) + 1.1, *each, 3.4]
        figure = plt.figure(figsize=(WIDE, sum(heights) + 0.6), layout="constrained")
        figure.suptitle(found.title, x=0.01, ha="left", fontsize=12, color=INK)
        rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
        for ax, panel in zip(rows[0].subplots(1, 2), bars, strict=True):
            draw_stacks(panel, ax)
        kinds: dict[str, Artist] = {}
        for row, one in zip(rows[1:-1], some, strict=True):
            kinds |= timeline(one, row.subplots())
        if kinds:
            key(rows[-2], kinds, len(WORDS))
        for ax, chart in zip(rows[-1].subplots(1, len(curves)), curves, strict=True):
            draw_chart(chart, ax)
        return figure


def draw_stacks(panel: Stacks, ax: Axes) -> None:
    """Stacked bars, as the page has them."""
    colours = {name: both[0] for name, both in charts.scheme().items()}
    for y, row in enumerate(panel.rows):
        for part in row.parts:
            ax.barh(y, part.width, left=part.x, height=0.34, color=colours[part.paint])
        ax.annotate(
            row.label, (0, y), xytext=(0, 5), textcoords="offset points", va="bottom", color=INK, fontsize=SIZE - 1
        )
        ax.annotate(row.value, (100, y), xytext=(0, 5), textcoords="offset points", va="bottom", ha="right",
                    color=RED if row.failed else INK, fontsize=SIZE - 1)  # fmt: skip
    if panel.line is not None:
        ax.axvline(panel.line, color=INK, lw=1, ls=(0, (4, 2)))
        ax.annotate(panel.limit, (panel.line, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
                    textcoords="offset points", ha="right", color=INK, fontsize=SIZE - 1)  # fmt: skip
    ax.set_ylim(len(panel.rows) - 0.5, -0.9)
    ax.set_xlim(0, 100)
    ax.set_yticks([])
    ax.set_xticks([m.x for m in panel.bottom], [m.text for m in panel.bottom])
    ax.spines["left"].set_visible(False)
    ax.set_title(panel.title, pad=14)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[paint]) for _, paint in panel.keys]
    legend_below(ax, TICKS, handles, [name for name, _ in panel.keys], ncols=4, handlelength=1.0, columnspacing=1.0)


def draw_chart(chart: Chart, ax: Axes) -> None:
    """Curves, as the page has them."""
    colours = {name: both[0] for name, both in charts.scheme().items()}
    for line in chart.lines:
        if line.band:
            corners = [[float(n) for n in place.split(",")] for place in line.band.split()]
            ax.fill([x for x, _ in corners], [100 - y for _, y in corners], color=colours[line.paint], alpha=0.14, lw=0)
        xs, ys = zip(*(map(float, place.split(",")) for place in line.places.split()), strict=True)
        dash = (0, tuple(float(n) / 2 for n in line.dashes.split())) if line.dashes else "-"
        dots = "o" if len(xs) <= 12 and not line.dashes else None
        ax.plot(
            xs, [100 - y for y in ys], color=colours[line.paint], ls=dash, lw=1.7, label=line.label, marker=dots, ms=4
        )
    ax.set_xlim(0, 100)
    ax.set_ylim(0, 100)
    ax.set_xticks([m.x for m in chart.bottom], [m.text for m in chart.bottom])
    ax.set_yticks([100 - m.y for m in chart.left], [m.text for m in chart.left])
    ax.grid(True, axis="y")
    ax.set_xlabel(chart.below)
    ax.set_title(chart.title)
    legend_below(ax, LABELLED, ncols=1 + (len(chart.lines) > 4))


def legend_below(ax: Axes, points: float, *what: Any, **form: Any) -> None:
    """A legend so many points below the axes, however high they are."""
    down = ScaledTranslation(0, -points / 72, ax.get_figure().dpi_scale_trans)  # type: ignore[union-attr]
    ax.legend(*what, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=ax.transAxes + down, borderaxespad=0,
              frameon=False, fontsize=SIZE - 1, **form)  # fmt: skip
