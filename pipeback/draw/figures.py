"""Figures: schedules as text grids and pictures, and real runs as traces for Perfetto or chrome://tracing.

    print(grid(flowing(2), stages=4, micro_batches=8))
    picture(timeline(flowing(2), 4, 8)).figure.savefig("pb.svg")
    pipe.record(); ...; trace(pipe, "run.json"); print(summary(measured(pipe)))

Only figures need matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from pipeback.counts import counted
from pipeback.draw import perfetto as traces
from pipeback.draw.pyplot import pyplot
from pipeback.draw.worker_bands import COLOURS as _COLOURS
from pipeback.draw.worker_bands import INK as _INK
from pipeback.draw.worker_bands import beside
from pipeback.schedules.ops import Schedule
from pipeback.schedules.placement import Placed
from pipeback.schedules.recording import Recording
from pipeback.schedules.timeline import UNIT, Slot, Time, bubble, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["beside", "compare", "grid", "measured", "picture", "summary", "trace"]
WORDS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}


def grid(schedule: Schedule, stages: int, micro_batches: int, width: int | None = None) -> str:
    """A text with one line per stage and one column per unit of time; `.` is idle.

    A forward F and a backward B take one unit each, or F, I and W where B is split into these, and updates take none.
    width: the number of columns that are shown; the rest is cut off and marked. None shows all.

    >>> from pipeback.schedules.programs import fill_drain
    >>> print(grid(fill_drain(2), stages=2, micro_batches=2))
    0 │ F0 F1 .  .  B0 B1
    1 │ .  F0 F1 B0 B1 .
    """
    slots = [slot for slot in timeline(schedule, stages, micro_batches) if slot.op.kind != "U"]
    span = int(max(slot.end for slot in slots))
    rows = [["."] * span for _ in range(stages)]
    for slot in slots:
        rows[slot.stage][int(slot.start)] = str(slot.op)
    cell = max(len(text) for row in rows for text in row)
    number = len(str(stages - 1))
    shown, more = (span, "") if width is None or width >= span else (width, " …")
    return "\n".join(
        f"{s:>{number}} │ " + (" ".join(text.ljust(cell) for text in row[:shown]) + more).rstrip()
        for s, row in enumerate(rows)
    )


def picture(
    slots: Iterable[Slot], ax: Axes | None = None, *, title: str | None = None, until: Time | None = None
) -> Axes:
    """Draw a timeline: one row per stage, one box per operation, with the number of its micro-batch if it fits.

    slots: from `timeline` (units of time) or `measured` (seconds). until: the end of the time axis.
    Returns the axes; save them with `picture(...).figure.savefig("name.png")` or `.svg`.
    """
    plt = pyplot()
    from matplotlib.patches import Patch

    slots = list(slots)
    if not slots:
        raise ValueError("there is nothing to draw: the timeline has no slots; give it micro_batches of at least 1")
    stages = 1 + max(slot.stage for slot in slots)
    begin = float(min(slot.start for slot in slots))
    end = float(until if until is not None else max(slot.end for slot in slots))
    if ax is None:
        _, ax = plt.subplots(
            figsize=(min(16.0, max(6.0, 0.34 * (end - begin) + 1.2)), 0.42 * stages + 1.3), layout="constrained"
        )
    shown = [slot for slot in slots if slot.op.kind != "U" and slot.start < end]
    kinds = [kind for kind in WORDS if any(slot.op.kind == kind for slot in shown)]
    for kind in kinds:
        some = [slot for slot in shown if slot.op.kind == kind]
        ax.barh(
            [slot.stage for slot in some],
            [float(min(slot.end, end) - slot.start) for slot in some],
            left=[float(slot.start) - begin for slot in some],
            height=0.86, color=_COLOURS[kind], edgecolor=plt.rcParams["axes.facecolor"], linewidth=0.8,
        )  # fmt: skip
    # a number in every box, as long as the boxes are wide enough to hold it
    figure = ax.get_figure(root=True)
    assert figure is not None
    inches = figure.get_size_inches()[0] * ax.get_position().width
    width = min((float(slot.end - slot.start) for slot in shown), default=0.0) / ((end - begin) or 1.0) * inches
    if width > 0.17:
        for slot in shown:
            middle = float(slot.start + min(slot.end, end)) / 2 - begin
            ax.text(
                middle, slot.stage, str(slot.op.mb), ha="center", va="center", fontsize=min(9.0, 30 * width), color=_INK
            )
    ax.set_ylim(stages - 0.5, -0.5)
    ax.set_xlim(0, end - begin)
    ax.set_yticks(range(stages) if stages <= 24 else range(0, stages, 5))
    ax.set_ylabel("stage")
    ax.set_xlabel("time")
    ax.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
    if title is not None:
        ax.set_title(title, loc="left", fontsize=11, color=_INK)
    handles = [Patch(color=_COLOURS[kind], label=WORDS[kind]) for kind in kinds]
    ax.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0.2, fontsize=9
    )
    return ax


class Recorded(Protocol):
    """A pipeline that has recorded a run."""

    @property
    def ranks(self) -> Any: ...

    @property
    def recorded(self) -> Recording: ...


def measured(pipe: Recorded) -> Recording:
    """The timeline of a real run: what `pipe.record()` measured, in seconds from the first operation.

    Over processes every rank calls it and gets the timeline of all ranks.
    """
    recording = pipe.recorded
    if not len(recording):
        raise ValueError("nothing was recorded: call pipe.record() before the pushes that are to be seen")
    return recording


def trace(pipe: Recorded, path: str | PathLike[str], name: str | None = None) -> dict[str, Any]:
    """Write what `pipe.record()` measured as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    Each rank (or worker thread) is shown as a process, with one row per stage. Over processes every rank calls this;
    the times are put on one clock, and the first rank writes. name: that of the run; None: the method's name.
    Returns what was written. `otherData` holds the bubble, which is the idle share of the workers' time between the
    first and the last operation of all, and the bubble that the schedule predicts.
    Times are measured on the host, so that work on an accelerator counts where the host waits for it.
    """
    recording = measured(pipe)
    recording.name = recording.name if name is None else name
    ranks = pipe.ranks
    if ranks.several and ranks.rank != ranks.everyone[0]:
        return traces.as_json(recording)
    return traces.write(recording, path)


def summary(recording: Recording) -> str:
    """A table of the workers' idle time in percent, measured and predicted.

    The rows below the first are `Recording.in_order` and `predicted` at the measured mean costs of every stage, and
    `predicted` at unit costs. Only the first eight workers have columns.
    """
    rows = {
        "measured": recording,
        "predicted, each worker in this order": recording.in_order(),
        "predicted by the schedule": recording.predicted(),
        "predicted, all F and B alike": recording.unit(),
    }
    names = [track.name.partition(" (")[0] for track in recording.tracks[:8]]
    widths = [max(8, len(name)) for name in names]
    cells = "  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))
    lines = [
        f"{recording.name or 'the run'}: {counted(recording.stages, 'stage')} on "
        f"{counted(len(recording.tracks), 'worker')}, "
        f"{counted(recording.micro_batches(), 'micro-batch')}, {1e3 * recording.idle().span:.1f} ms; "
        f"the clocks agree within {1e6 * recording.uncertainty:.0f} µs",
        f"{'idle %':<37}     all  between fill and drain  {cells}",
    ]
    for title, row in rows.items():
        idle = row.idle()
        each = "  ".join(f"{100 * share:{width}.1f}" for share, width in zip(idle.each, widths, strict=False))
        lines.append(f"{title:<37}{100 * idle.share:8.1f}{100 * idle.steady:24.1f}  {each}")
    return "\n".join(lines)


def compare(schedules: Mapping[str, Schedule], stages: int, micro_batches: int, until: int | None = None) -> Any:
    """A figure with one timeline per schedule, on one time axis, to compare their bubbles. Returns the figure.

    until: where the axis ends; None, or beyond the end: at the end of the longest.
    """
    plt = pyplot()

    runs = {name: list(timeline(schedule, stages, micro_batches, UNIT)) for name, schedule in schedules.items()}
    last = int(max(slot.end for slots in runs.values() for slot in slots))
    end = min(until or last, last)
    height = 0.3 * stages + 0.85
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(min(16.0, 0.27 * end + 1.0), height * len(runs)), layout="constrained", squeeze=False
    )
    told: set[str] = set()  # what legends above explain
    for n, (ax, (name, slots)) in enumerate(zip(axes[:, 0], runs.items(), strict=True)):
        schedule = schedules[name]
        owner = schedule.placement.owner if isinstance(schedule, Placed) else range(stages)  # those that wait, too
        idle = bubble([Slot(s.start, min(s.end, end), s.stage, s.op) for s in slots if s.start < end], owner)
        picture(slots, ax, title=f"{name}   (idle in what is shown: {idle:.0%})", until=end)
        words = {text.get_text() for text in ax.get_legend().get_texts()}
        if words <= told:
            ax.get_legend().remove()
        told |= words
        if n < len(runs) - 1:
            ax.set_xlabel("")
            ax.set_xticklabels([])
    _widen(figure)
    return figure


def _widen(figure: Any) -> None:
    """Make a figure at least so wide that no title touches the legend beside it."""
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    least = 0.0
    for ax in figure.axes:
        titles = [text for text in ax.findobj(Text, include_self=False) if text.get_text() == ax.get_title("left")]
        beside = [*titles, *([] if ax.get_legend() is None else [ax.get_legend()])]
        least = max(least, sum(each.get_window_extent().width for each in beside) / figure.dpi)
    figure.set_size_inches(max(width, least + 1.0), height)  # an inch for the numbers of stages, and between the two
