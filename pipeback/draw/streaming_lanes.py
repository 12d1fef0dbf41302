"""Streaming lanes: weight streaming as a picture of fetches, computing and updates on one time axis."""

from __future__ import annotations

from typing import Any

from pipeback.draw.pyplot import pyplot
from pipeback.draw.worker_bands import BAND, COLOURS, IDLE, INK
from pipeback.schedules.recording import Recording

FETCH, STORE = "#8cc5a2", "#b7a3d0"
LANES = ("weights come", "device computes", "store updates")


def lanes(recording: Recording, *, begin: float = 0.0, end: float | None = None) -> Any:
    """A figure with three lanes per worker, with stage numbers in the boxes. begin, end: of the time axis, in seconds.

    Raises ValueError if no weights were streamed.
    """
    plt = pyplot()
    from matplotlib.patches import Patch

    tracks = [track for track in recording.tracks if track.moves]
    if not tracks:
        raise ValueError("no weights were streamed: record a pipeline that has a store")
    until = recording.idle().span if end is None else end
    figure, axes = plt.subplots(
        len(tracks), 1, figsize=(11.2, 2.3 * len(tracks) + 0.75), layout="constrained", squeeze=False
    )
    for ax, track in zip(axes[:, 0], tracks, strict=True):
        did = [slot for slot in track.slots if slot.op.kind != "U"]
        computed = [(float(slot.start), float(slot.end), COLOURS[slot.op.kind], slot.stage) for slot in did]
        rows = [
            [(m.start, m.end, FETCH, m.stage) for m in track.moves if m.kind == "fetch"],
            computed,
            [(m.start, m.end, STORE, m.stage) for m in track.moves if m.kind == "store"],
        ]
        for n, spans in enumerate(rows):
            ax.broken_barh(
                [(1e3 * begin, 1e3 * (until - begin))], (n + 0.06, 0.88), facecolors=IDLE if n == 1 else BAND
            )
            seen = [(max(a, begin), min(b, until), colour, s) for a, b, colour, s in spans if b > begin and a < until]
            ax.broken_barh(
                [(1e3 * a, 1e3 * (b - a)) for a, b, _, _ in seen], (n + 0.06, 0.88),
                facecolors=[colour for *_, colour, _ in seen], edgecolors="white", linewidths=0.6,
            )  # fmt: skip
            _numbers(ax, seen, n + 0.5, 0.012 * (until - begin))
        share = 1 - sum(b - a for a, b, *_ in computed) / recording.idle().span
        ax.set_title(f"{recording.name or 'streamed'}: {track.name}", loc="left", fontsize=11.5, color=INK)
        ax.set_title(f"not computing {share:.1%} of the time", loc="right", fontsize=10.5, color=INK)
        ax.set_ylim(3, 0)
        ax.set_xlim(1e3 * begin, 1e3 * until)
        ax.set_yticks([0.5, 1.5, 2.5], LANES, fontsize=10, color=INK)
        ax.tick_params(length=0, labelcolor=INK)
        for side in ("top", "right", "left", "bottom"):
            ax.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("milliseconds; the numbers are stages", color=INK)
    names = {"fetch of a stage's weights": FETCH, "forward": COLOURS["F"], "backward": COLOURS["B"],
             "update in the store": STORE, "not computing": IDLE}  # fmt: skip
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)
    return figure


def _numbers(ax: Any, spans: list[tuple[float, float, str, int]], y: float, least: float) -> None:
    """Write the stage's number on every run of boxes of one stage, if there is room for it."""
    runs: list[list[float]] = []
    stages: list[int] = []
    for a, b, _, s in sorted(spans):
        if stages and stages[-1] == s and a - runs[-1][1] < least:
            runs[-1][1] = b
        else:
            runs.append([a, b])
            stages.append(s)
    for (a, b), s in zip(runs, stages, strict=True):
        if b - a > least:
            ax.text(1e3 * (a + b) / 2, y, str(s), ha="center", va="center", fontsize=9, color=INK)
