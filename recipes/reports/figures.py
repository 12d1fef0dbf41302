"""Figures: the pictures of a report, as files and as data for the page, or the reason why there is none."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from pipeback.recipes.reports.bars import Bar, cost_bars, draw_bars, time_bars
from pipeback.recipes.reports.charts import Group, groups
from pipeback.recipes.reports.heat_maps import draw_fields, fields
from pipeback.recipes.reports.histories import MONITOR, histories
from pipeback.recipes.reports.kinds import draw_schedules, kinds
from pipeback.recipes.reports.plots import draw_curves, draw_final
from pipeback.recipes.reports.row_charts import Rows, bars, finals
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, Method, has
from pipeback.recipes.reports.style import ON_DARK, STYLE, Paint
from pipeback.recipes.reports.target import Target

PHONE, NIGHT = "(max-width: 700px)", "(prefers-color-scheme: dark)"
Draw = Callable[[bool], plt.Figure]  # narrow -> the figure


class Picture(NamedTuple):
    """A picture of the page; `missing` says why there is none.

    images: its data, by the media for which each is; the first that fits is shown, the last has none. Or groups of
    curves, or panels of rows, which the page draws itself.
    """

    images: Sequence[tuple[str, str]] = ()
    groups: Sequence[Group] = ()
    rows: Sequence[Rows] = ()
    missing: str = ""


def pictures(methods: Sequence[Method], goal: Target | None, folder: Path, paint: Paint) -> dict[str, Picture]:
    """Return the pictures of the page by name; all are written to the folder as PNG."""
    with plt.rc_context(STYLE):
        found = curves(methods, folder, paint)
        png(draw_final(methods, paint), folder / "final.png")
        found["final"] = Picture(rows=[finals(methods, paint)])
        if measures := cost_bars(methods):
            found["cost"] = barred(methods, measures, "not logged", folder / "cost.png", paint)
        else:
            found["cost"] = Picture(missing=f"no run logged its throughput or memory; the callback {MONITOR} does")
        if goal is None:
            found["target"] = Picture(missing="no run finished that could set a target; give one with target=")
        elif measures := time_bars(methods, goal):
            found["target"] = barred(methods, measures, "not reached", folder / "target.png", paint)
        else:
            found["target"] = Picture(missing="no run reached it")
        drawn: dict[str, Draw | str] = {kind: stale(methods, kind) for kind in ("gap", "delay")}
        run_by = kinds(methods)
        drawn["schedules"] = (
            partial(draw_schedules, run_by) if run_by else "no compared method runs by one of the schedules"
        )
        return found | {name: drawing(draw, folder / f"{name}.png") for name, draw in drawn.items()}


def curves(methods: Sequence[Method], folder: Path, paint: Paint) -> dict[str, Picture]:
    """Return the curves over samples, steps and seconds; the files show the metric over each, the rest over one."""
    told, found = histories(methods), {}
    for axis in (SAMPLES, STEPS, SECONDS):
        if any(has(run, axis) for m in methods for run in m.runs):
            found[axis] = Picture(groups=groups(methods, told, axis, paint))
            png(draw_curves(methods, told[0], axis, paint), folder / f"{axis}.png")
        else:
            found[axis] = Picture(missing=f"no run logged {axis}, which `pipeback train` logs with every validation")
    for history in told[1:]:
        if not history.missing:
            axis = STEPS if found[SAMPLES].missing else SAMPLES
            png(draw_curves(methods, history, axis, paint), folder / f"{history.name}.png")
    return found


def barred(methods: Sequence[Method], measures: Sequence[Bar], none: str, file: Path, paint: Paint) -> Picture:
    png(draw_bars(methods, measures, none, paint), file)
    return Picture(rows=bars(methods, measures, none, paint))


def stale(methods: Sequence[Method], kind: str) -> Draw | str:
    """Return what draws the heat maps of a kind, gap or delay, or why there are none."""
    panels, fresh = fields(methods, kind)
    if panels:
        return partial(draw_fields, panels, kind)
    if fresh:
        return ("it was zero wherever it was probed; the first micro-batch of a run, which is probed first, "
                "meets no update in between, whatever the method")  # fmt: skip
    return f"no run logged pipeback/{kind}/stage_00 and so on; the callback {MONITOR} does"


def drawing(draw: Draw | str, file: Path) -> Picture:
    if isinstance(draw, str):
        return Picture(missing=draw)
    small, large = draw(True), draw(False)
    light = [(PHONE, png(small)), ("", png(large, file))]
    with plt.rc_context(ON_DARK):
        dark = [
            (f"{NIGHT} and {PHONE}", png(as_laid_out(draw(True), small))),
            (NIGHT, png(as_laid_out(draw(False), large))),
        ]
    return Picture([*dark, *light])


def as_laid_out(figure: plt.Figure, other: plt.Figure) -> plt.Figure:
    """Place all as in the other one, which has the same parts and was saved: to find the places takes longer than to
    draw.
    """
    for axes, there in zip(figure.axes, other.axes, strict=True):
        axes.set_position(there.get_position())
    figure.set_layout_engine("none")
    return figure


def png(figure: plt.Figure, file: Path | None = None) -> str:
    """Return a figure as PNG for the page; also write it to the file, if one is given."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    if file:
        file.write_bytes(content.getvalue())
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
