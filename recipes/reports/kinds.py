"""Kinds: the kinds of schedule as pictures and as text, with one small example of each."""

from __future__ import annotations

from matplotlib import pyplot as plt

from pipeback.draw.figures import grid, picture
from pipeback.recipes.reports.style import NARROW, WIDE
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.timeline import bubble, timeline

STAGES, MICRO_BATCHES = 4, 8
# name, description, schedule; flushes have as many micro-batches as there are stages
KINDS: tuple[tuple[str, str, Schedule], ...] = (
    ("gpipe", "fill, drain, update", fill_drain(STAGES)),
    ("one_f_one_b", "early backwards, the same bubble", one_f_one_b(STAGES)),
    ("slack 1 (pipedream, spectrain)", "never flushed, D = S − 1 − s", flowing(1)),
    ("slack 2 (pb, sc, lwp, cerebras, pipemare)", "never flushed, D = 2(S − 1 − s)", flowing(2)),
)


def grids() -> list[tuple[str, str]]:
    """Return title and text grid of each kind."""
    return [(f"{name}: {what}", grid(schedule, STAGES, MICRO_BATCHES)) for name, what, schedule in KINDS]


def draw_schedules(narrow: bool) -> plt.Figure:
    timelines = [list(timeline(schedule, STAGES, MICRO_BATCHES)) for _, _, schedule in KINDS]
    span = max(float(slot.end) for slots in timelines for slot in slots)
    size = (NARROW, 1.55 * len(KINDS)) if narrow else (WIDE, 1.62 * len(KINDS))
    figure, axes = plt.subplots(len(KINDS), 1, figsize=size, layout="constrained")
    for n, (ax, (name, what, _), slots) in enumerate(zip(axes, KINDS, timelines, strict=True)):
        picture(slots, ax=ax, until=span)
        ax.set_title(f"{name}:{chr(10) if narrow else ' '}{what}   (bubble here {bubble(slots):.0%})", fontsize=9.5)
        ax.set_xlabel("time, in forwards" if n == len(KINDS) - 1 else "")
        ax.set_xticks(range(0, int(span) + 1, 8 if narrow else 4))
        if (legend := ax.get_legend()) and (n or narrow):
            legend.remove()  # one legend serves all panels
    if narrow:
        handles, labels = [p[0] for p in axes[0].containers], ["forward", "backward"]
        figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False)
    return figure
