"""Version ring: holds the last versions of the weights of stages that run as one, where forwards (F) run on the version
at which their micro-batch entered the pipeline, and backwards (B) on the same (vertical sync).

    F(i) and B(i) on version e(i) = v + max(0, i − i' − D)        U after B makes one more version

v is the version, and i' the micro-batch, with which the pipeline has begun; D is the number of forwards that stage 0
runs ahead. A version lies in the slot of its number, modulo the number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.vectorized.buffers.waiting import Turns, Waiting
from pipeback.vectorized.steps.rows import Rows


class EntryVersions(NamedTuple):
    """The version of stage 0 at which micro-batches enter.

    start, base: the first micro-batch since the pipeline was empty, and the version then. slack: the forwards that a
    stage runs ahead of the next one.
    """

    start: int
    base: int
    slack: int

    def entry(self, stage: Stage, mb: int) -> int:
        """Return the version of stage 0 at which a micro-batch enters, in a pipeline of which this is a stage."""
        return self.base + max(0, mb - self.start - self.slack * (stage.stages - 1))

    def newest(self, stage: Stage, mb: int) -> int:
        """Return the version of a stage when it does F of a micro-batch."""
        return self.base + max(0, mb - self.start - self.slack * (stage.stages - 1 - stage.index))


class VersionRing:
    """A ring (slots, n, …) per trainable weight. like: says where the rows are in the pipeline."""

    def __init__(self, rows: Rows, like: Waiting, entered: EntryVersions) -> None:
        self.rows, self.like, self.entered, first = rows, like, entered, rows.stages[0]
        self.length = entered.slack * (first.stages - 1) + 2  # of those between an entry and the newest, and one more
        self.rings = [w.new_zeros(self.length, *w.shape) for w in rows.stepped]
        self._alone = len(rows.stages) == 1
        count = 1 if self._alone else len(rows.stages)
        self._flat = [ring.view(self.length * count, -1) for ring in self.rings]
        self._count = count

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    def _lines(self, versions: Sequence[int], first: int) -> Tensor:
        """Return where versions of neighbouring rows are, as lines of `_flat`. first: the first of these rows."""
        lines = [v % self.length * self._count + first + n for n, v in enumerate(versions)]
        return torch.tensor(lines, device=self.like.device)

    # -- at a tick at which a stage with place p does F of micro-batch f − p and B of b + p --------------------------

    def fore(self, f: int, rows: tuple[int, int] | None = None) -> list[Tensor]:
        """Keep the newest weights; return all weights on which F runs. rows: as `WeightRing.keep`."""
        return self.fore_of([(r, f - self.like.at[r]) for r in self._some(rows)], rows)

    def fore_of(self, turns: Turns, rows: tuple[int, int] | None = None) -> list[Tensor]:
        """As `fore`, for F of these (row, micro-batch), one of each row."""
        first, stages = turns[0][0], self.rows.stages
        lines = self._lines([self.entered.newest(stages[r], i) for r, i in turns], first)
        for flat, w in zip(self._flat, self.rows.stepped, strict=True):
            mine = w if rows is None else w[slice(*rows)]
            flat.index_copy_(0, lines, mine.reshape(len(turns), -1))
        return self.used_of(turns, rows)

    def used(self, b: int, rows: tuple[int, int] | None = None) -> list[Tensor]:
        """Return all weights for B, as F used them."""
        return self.used_of([(r, b + self.like.at[r]) for r in self._some(rows)], rows)

    def _some(self, rows: tuple[int, int] | None) -> range:
        return range(len(self.rows.stages)) if rows is None else range(*rows)

    def used_of(self, turns: Turns, rows: tuple[int, int] | None = None) -> list[Tensor]:
        """Return all weights of these (row, micro-batch), one of each row, as F uses them."""
        stages = self.rows.stages
        lines = self._lines([self.entered.entry(stages[r], i) for r, i in turns], turns[0][0])
        whole = self.rows.weights
        found: list[Any] = list(whole if rows is None else [w[slice(*rows)] for w in whole])
        for n, flat in zip(self.rows.trained, self._flat, strict=True):
            found[n] = flat.index_select(0, lines).view(found[n].shape)
        return found

    # -- between runs of ticks, when the stages keep the versions ----------------------------------------------------

    def take(self, entered: EntryVersions) -> None:
        """Take over the versions that the stages keep. entered: since the pipeline was empty."""
        self.entered = entered
        for r, stage in enumerate(self.rows.stages):
            for version, kept in stage.versions.kept.items():
                if stage.version - version < self.length:
                    self._put(r, version, kept)

    def _put(self, r: int, version: int, weights: Sequence[Tensor]) -> None:
        for place, w in zip(self._place(r, version), weights, strict=True):
            if place.data_ptr() != w.data_ptr():
                place.copy_(w)

    def _place(self, r: int, version: int) -> list[Tensor]:
        """Return where a version of a row lies."""
        slots = [ring[version % self.length] for ring in self.rings]
        return slots if self._alone else [slot[r] for slot in slots]

    def give(self, done: Sequence[int]) -> None:
        """Hand the versions that are still needed back to the stages, which know of the rounds that are `done`."""
        for r, stage in enumerate(self.rows.stages):
            if not done[stage.index]:
                continue
            kept, newest = stage.versions.kept, stage.version
            least = min([newest - stage.versions.history, *(flight.version for flight in stage.flights.values())])
            first = max(least, min([newest - done[stage.index], *kept]))
            stage.versions.put({version: self._place(r, version) for version in range(first, newest)})
            stage.versions.note_copies(stage.flights)
