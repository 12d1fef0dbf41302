"""Lanes: a device whose weights come layer by layer, with three clocks, as `plan/dry_run.py` has them for real ones.

    fetching        W1 ──── W2 ──── W3 ────             a layer's fetch waits for its update, and for a free slot
    computing       F0 │ F1 │ F2 │ B2 │ B1 │ B0         an operation waits for the weights that it needs
    updating                          U2 ── U1 ── U0    its gradients leave, and the optimizer steps where it lives

There are prefetch + 1 slots. A layer whose turn comes again while it is in its slot is not fetched once more, unless it
was updated since: its new weights are where it lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Visit(NamedTuple):
    """A layer's operations in a row, and what they need."""

    layer: int
    compute: float  # seconds
    fetch: float  # seconds, to bring its weights
    leave: float = 0.0  # seconds, for its gradients to leave, after a backward
    update: float = 0.0  # seconds of its optimizer step


class Streamed(NamedTuple):
    """The times of a step in the steady state."""

    seconds: float
    waiting: float  # seconds in which nothing was computed

    @property
    def share(self) -> float:
        return self.waiting / self.seconds if self.seconds else 0.0


def stream(visits: Sequence[Visit], prefetch: int = 1, steps: int = 4) -> Streamed:
    """Run the same visits step after step; the last one counts. Fetching and leaving are two directions of the link."""
    fetching = leaving = updating = now = 0.0
    updated: dict[int, float] = {}
    ends: list[float] = []  # of the visits so far
    begin = 0.0
    here: int | None = None
    for step in range(steps):
        if step == steps - 1:
            begin = now
        for visit in visits:
            ready = now
            if visit.layer != here:
                slot = ends[-1 - prefetch] if len(ends) > prefetch else 0.0
                fetching = max(fetching, slot, updated.get(visit.layer, 0.0)) + visit.fetch
                ready = fetching
            here = None if visit.leave or visit.update else visit.layer
            now = max(now, ready) + visit.compute
            ends.append(now)
            if visit.leave or visit.update:
                leaving = max(leaving, now) + visit.leave
                updating = updated[visit.layer] = max(updating, leaving) + visit.update
    seconds = now - begin
    return Streamed(seconds, seconds - sum(visit.compute for visit in visits))
