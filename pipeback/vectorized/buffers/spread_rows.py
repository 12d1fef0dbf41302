"""Spread rows: writes the rows of matrices to lines of larger ones that are evenly spaced, by copies with strides.

On a CPU such a copy takes less time than torch's `index_copy_`, where rows are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pipeback.tensors.accelerators import away

LARGE = 1 << 14  # bytes of a row from which on this pays; the calls for smaller ones take longer than the copies


class EvenLines(NamedTuple):
    """Neighbouring rows, and where they go: to the line `first`, and to every line `step` further on."""

    rows: slice
    first: int
    step: int


def runs(lines: Sequence[int]) -> list[EvenLines]:
    """Return runs of rows that go to these lines.

    >>> runs([1, 4, 7, 0, 3])
    [EvenLines(rows=slice(0, 3, None), first=1, step=3), EvenLines(rows=slice(3, 5, None), first=0, step=3)]
    """
    found: list[EvenLines] = []
    begin = 0
    for end in range(1, len(lines) + 1):
        step = lines[begin + 1] - lines[begin] if end > begin + 1 else 1
        goes_on = end < len(lines) and lines[end] > lines[end - 1]
        if not goes_on or (end > begin + 1 and lines[end] - lines[end - 1] != step):
            found.append(EvenLines(slice(begin, end), lines[begin], step))
            begin = end
    return found


class SpreadRows:
    """Matrices (lines, elements), each of which gets as many rows at a time, to the same lines."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = list(matrices)
        self._large = [m.shape[1] * m.itemsize >= LARGE and not away(m.device) for m in self.matrices]
        self._known: dict[int, list[tuple[slice, list[Tensor]]]] = {}

    def put(self, values: Sequence[Tensor], places: Tensor, key: int | None = None) -> None:
        """Write the values (rows, elements), one per matrix, to the lines `places`. key: a number that stands for these
        lines, to remember them; None: nothing is remembered, and nothing copied with strides.
        """
        large: list[Tensor] = []
        for matrix, value, spread in zip(self.matrices, values, self._large, strict=True):
            if spread and key is not None:
                large.append(value)
            else:
                matrix.index_copy_(0, places, value)
        if key is None or not large:
            return
        if key not in self._known:
            into = [m for m, spread in zip(self.matrices, self._large, strict=True) if spread]
            self._known[key] = [(run.rows, [_lines(m, run) for m in into]) for run in runs(places.tolist())]
        for rows, parts in self._known[key]:
            for part, value in zip(parts, large, strict=True):
                part.copy_(value[rows])


def _lines(matrix: Tensor, run: EvenLines) -> Tensor:
    """The lines of a run, as a view."""
    return matrix[run.first :: run.step][: run.rows.stop - run.rows.start]
