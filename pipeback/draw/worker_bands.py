"""Worker bands: a measured run as a picture with one band per worker and one row per stage; idle times are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeback.counts import numbered
from pipeback.draw.pyplot import pyplot
from pipeback.schedules.recording import Recording
from pipeback.schedules.timeline import Time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# forward, backward: apart in lightness too, so that print and colour-blind readers can tell them; a backward that is
# split is the gradient of the input, I, and that of the weights, W
COLOURS = {"F": "#7fb3e6", "B": "#f2a65a", "U": "#7a7a7a", "I": "#f2a65a", "W": "#a3c585"}
INK, BAND, IDLE = "#1f2933", "#f4f6f8", "#f2c2c4"


def beside(recordings: Sequence[Recording], window: int | None = None) -> Any:
    """A figure with two panels per run on one time axis: the measured run, and the run that its schedule predicts.

    recordings: runs, from `measured`. The prediction lets operations take the mean time that was measured at their
    stage, and messages none. window: show the steady state alone: so many micro-batches in the middle of each run;
    None: show all. Returns the figure. Raises ValueError where nothing was recorded, or fewer than twice `window`.
    """
    plt = pyplot()

    if not recordings or not all(len(recording) for recording in recordings):
        raise ValueError("there is nothing to draw: nothing was recorded; call pipe.record() before the pushes")
    panels = []
    for run in recordings:
        ideal = run.predicted()
        name = f"{run.name}: " if run.name else ""
        panels.append((run, f"{name}measured"))
        panels.append((ideal, f"{name}predicted by the schedule at these costs"))
    if window is not None:
        panels = [(_middle(run, window), title) for run, title in panels]
    end = max(float(slot.end) for run, _ in panels for slot in run)
    heights = [_height(run) + 0.7 for run, _ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11.2, sum(heights) + 0.55), layout="constrained", squeeze=False, height_ratios=heights
    )
    for ax, (run, title) in zip(axes[:, 0], panels, strict=True):
        idle = run.idle()
        bands(run, ax, until=end)
        ax.set_title(title, loc="left", fontsize=11.5, color=INK)
        text = f"idle {idle.share:.1%}, between fill and drain {idle.steady:.1%}"
        if window is not None:
            text = f"idle {idle.share:.1%}, {1e3 * idle.span / window:.1f} ms per micro-batch"
        ax.set_title(text, loc="right", fontsize=10.5, color=INK)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1, 0])
    where = "" if window is None else f" of a run in its steady state, {window} micro-batches long"
    axes[-1, 0].set_xlabel(f"milliseconds{where}", color=INK)
    figure.legend(
        handles=_legend(any(run.split for run, _ in panels)),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=10,
    )
    return figure


def _middle(run: Recording, window: int) -> Recording:
    count = run.micro_batches()
    if not 0 < window <= count // 2:
        raise ValueError(
            f"window={window}: the steady state of a run of {count} micro-batches is at most its middle half; "
            f"write window={max(1, count // 4)}, or run more micro-batches"
        )
    first = (count - window) // 2
    return run.window(first, first + window)


def bands(recording: Recording, ax: Axes, *, until: Time | None = None) -> Axes:
    """Draw a recording into `ax`, in milliseconds. until: where the time axis ends, in seconds."""
    end = float(until if until is not None else recording.idle().span)
    top, places, names = 0.0, [], []
    for track, gaps, share in zip(recording.tracks, recording.gaps(), recording.idle().each, strict=True):
        mine = [s for s, w in enumerate(recording.owner) if w == track.worker]
        high = max(2.0, len(mine))
        row = {s: top + n * high / len(mine) for n, s in enumerate(mine)}
        ax.broken_barh([(0, 1e3 * recording.idle().span)], (top, high), facecolors=BAND)
        ax.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in gaps], (top, high), facecolors=IDLE)
        for s in mine:
            for kind, colour in COLOURS.items():
                some = [slot for slot in track.slots if slot.stage == s and slot.op.kind == kind]
                spans = [(1e3 * float(slot.start), 1e3 * float(slot.end - slot.start)) for slot in some]
                ax.broken_barh(spans, (row[s], high / len(mine)), facecolors=colour)
        places.append(top + high / 2)
        which = stages_of(mine)
        copy = f", replica {track.replica}" if recording.tracks[-1].replica else ""
        names.append(f"{track.name.partition(' (')[0]}{copy}\n{which}\nidle {share:.1%}")
        top += high + 0.5
    ax.set_ylim(top - 0.5, 0)
    ax.set_xlim(0, 1e3 * end)
    ax.set_yticks(places, names, fontsize=9.5, color=INK)
    ax.tick_params(length=0, labelcolor=INK)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
    return ax


def stages_of(numbers: Sequence[int]) -> str:
    """The stages of a worker in words.

    >>> stages_of([2]), stages_of([0, 1, 2]), stages_of([0, 3])
    ('stage 2', 'stages 0 to 2', 'stages 0, 3')
    """
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"stages {numbers[0]} to {numbers[-1]}"
    return numbered("stage", numbers)


def _height(recording: Recording) -> float:
    """The height of a band in inches."""
    rows = [max(2, recording.owner.count(track.worker)) for track in recording.tracks]
    return max(0.62 * len(rows), 0.16 * sum(rows)) + 0.06 * len(rows)


def _legend(split: bool) -> list[Any]:
    from matplotlib.patches import Patch

    words = {"I": "gradient of the input", "W": "gradient of the weights"} if split else {"B": "backward"}
    return [
        Patch(color=COLOURS["F"], label="forward"),
        *(Patch(color=COLOURS[kind], label=word) for kind, word in words.items()),
        Patch(color=COLOURS["U"], label="update"),
        Patch(color=IDLE, label="idle"),
    ]
