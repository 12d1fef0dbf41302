"""Kinds: the kinds of schedule of the compared methods, as pictures and as text, with one small example of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import pyplot as plt

from pipeback.draw.figures import grid, picture
from pipeback.recipes.reports.runs import Method
from pipeback.recipes.reports.style import NARROW, SIZE, WIDE
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import fill_drain, flowing, one_f_one_b
from pipeback.schedules.split import zb_h1, zb_h2
from pipeback.schedules.timeline import bubble, timeline

STAGES, MICRO_BATCHES = 4, 8


class Kind(NamedTuple):
    """A kind of schedule. methods: those that run by it, at their own slack."""

    name: str
    what: str
    schedule: Schedule
    methods: tuple[str, ...]


# flushes have as many micro-batches as there are stages
KINDS = (
    Kind("", "fill, drain, update", fill_drain(STAGES), ("gpipe",)),
    Kind("", "early backwards, the same bubble", one_f_one_b(STAGES), ("one_f_one_b",)),
    Kind("", "a split backward, a smaller bubble", zb_h1(STAGES), ("zb_h1",)),
    Kind("", "a split backward, no bubble", zb_h2(STAGES), ("zb_h2",)),
    Kind("slack 1", "never flushed, D = S − 1 − s", flowing(1), ("pipedream", "spectrain")),
    Kind("slack 2", "never flushed, D = 2(S − 1 − s)", flowing(2),
         ("pb", "sc", "lwp", "lwp_w_sc", "cerebras", "pipemare")),
)  # fmt: skip


def kinds(methods: Sequence[Method]) -> list[Kind]:
    """Return the kinds that the methods run by, each named after those of its methods that are compared.

    Runs of other programs do not say their method; all kinds are returned if no run does.
    """
    told = any(m.facts.get("method") for m in methods)
    bases = {m.base for m in methods if not m.equal_slack}
    found = []
    for n, kind in enumerate(KINDS):
        some = [name for name in kind.methods if name in bases or not told]
        if some:
            names = ", ".join(some)
            found.append(kind._replace(name=f"{kind.name} ({names})" if kind.name else names))
        elif n == len(KINDS) - 1 and any(m.equal_slack for m in methods):
            found.append(kind)
    return found


def grids(methods: Sequence[Method]) -> list[tuple[str, str]]:
    """Return title and text grid of each kind that the methods run by."""
    return [(f"{k.name}: {k.what}", grid(k.schedule, STAGES, MICRO_BATCHES)) for k in kinds(methods)]


def draw_schedules(shown: Sequence[Kind], narrow: bool) -> plt.Figure:
    """Draw a timeline per kind. shown: at least one."""
    timelines = [list(timeline(kind.schedule, STAGES, MICRO_BATCHES)) for kind in shown]
    span = max(float(slot.end) for slots in timelines for slot in slots)
    size = (NARROW, 1.55 * len(shown) + 0.3) if narrow else (WIDE, 1.62 * len(shown) + 0.2)
    figure, axes = plt.subplots(len(shown), 1, figsize=size, layout="constrained", squeeze=False)
    axes = axes[:, 0]
    for n, (ax, (name, what, _, _), slots) in enumerate(zip(axes, shown, timelines, strict=True)):
        picture(slots, ax=ax, until=span)
        ax.set_title(f"{name}:{chr(10) if narrow else ' '}{what}   (bubble here {bubble(slots):.0%})", fontsize=SIZE)
        ax.set_xlabel("time, in forwards" if n == len(shown) - 1 else "")
        ax.set_xticks(range(0, int(span) + 1, 8 if narrow else 4))
        if legend := ax.get_legend():
            for letters in legend.get_texts():
                letters.set_fontsize(SIZE)
            if n or narrow:
                legend.remove()  # one legend serves all panels
    if narrow:
        handles, labels = [p[0] for p in axes[0].containers], ["forward", "backward"]
        figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False)
    return figure
