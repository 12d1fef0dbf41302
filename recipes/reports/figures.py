"""Figures: the pictures of a report, as files and as data for the page, or the reason why there is none."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from pipeback.recipes.reports.bars import cost_bars, draw_bars, time_bars
from pipeback.recipes.reports.heat_maps import draw_fields, fields
from pipeback.recipes.reports.kinds import draw_schedules, kinds
from pipeback.recipes.reports.plots import draw_curves, draw_final
from pipeback.recipes.reports.runs import SAMPLES, SECONDS, STEPS, Method, has
from pipeback.recipes.reports.style import STYLE, Paint
from pipeback.recipes.reports.target import Target

MONITOR = "pipeback.lightning.PipelineMonitor"
Draw = Callable[[bool], plt.Figure]  # narrow -> the figure


class Picture(NamedTuple):
    """The data of a picture for the page; `missing` says why there is none."""

    wide: str = ""
    narrow: str = ""
    missing: str = ""


def pictures(methods: Sequence[Method], goal: Target | None, folder: Path) -> dict[str, Picture]:
    """Return the pictures by name, drawn wide and narrow; the wide ones are written to the folder."""
    paint = Paint(methods)
    drawn: dict[str, Draw | str] = {"final": partial(draw_final, methods, paint)}
    found = kinds(methods)
    drawn["schedules"] = partial(draw_schedules, found) if found else "no compared method runs by one of the schedules"
    for axis in (SAMPLES, STEPS, SECONDS):
        if any(has(run, axis) for m in methods for run in m.runs):
            drawn[axis] = partial(draw_curves, methods, axis, paint)
        else:
            drawn[axis] = f"no run logged {axis}, which `pipeback train` logs with every validation"
    if bars := cost_bars(methods):
        drawn["cost"] = partial(draw_bars, methods, bars, "not logged", paint)
    else:
        drawn["cost"] = f"no run logged its throughput or memory; the callback {MONITOR} does"
    if goal is None:
        drawn["target"] = "no run finished that could set a target; give one with target="
    elif bars := time_bars(methods, goal):
        drawn["target"] = partial(draw_bars, methods, bars, "not reached", paint)
    else:
        drawn["target"] = "no run reached it"
    for kind in ("gap", "delay"):
        panels, fresh = fields(methods, kind)
        if panels:
            drawn[kind] = partial(draw_fields, panels, kind)
        elif fresh:
            drawn[kind] = ("it was zero wherever it was probed; the first micro-batch of a run, which is probed first, "
                           "meets no update in between, whatever the method")  # fmt: skip
        else:
            drawn[kind] = f"no run logged pipeback/{kind}/stage_00 and so on; the callback {MONITOR} does"
    with plt.rc_context(STYLE):
        return {name: drawing(draw, folder / f"{name}.png") for name, draw in drawn.items()}


def drawing(draw: Draw | str, file: Path) -> Picture:
    return Picture(missing=draw) if isinstance(draw, str) else Picture(png(draw(False), file), png(draw(True)))


def png(figure: plt.Figure, file: Path | None = None) -> str:
    """Return a figure as PNG for the page; also write it to the file, if one is given."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    if file:
        file.write_bytes(content.getvalue())
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
