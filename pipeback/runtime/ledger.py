"""Ledger: records which version of the weights every forward and every backward used, the last million of them.

Many records at once can be put off: they are written when somebody looks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

from pipeback.notebook import table

Columns = tuple[Sequence[int], Sequence[int], Sequence[int]]  # of records: 2·stage, + 1 for B; micro-batch; version
SHOWN = 12  # the newest micro-batches that a notebook shows


class Record(NamedTuple):
    """F (forward) or B (backward) of a micro-batch ran on the stage's weights after `version` updates of that stage."""

    stage: int
    kind: str
    mb: int
    version: int


class Ledger(Sequence[Record]):
    """Records in the order in which a worker made them, 20 bytes each; the oldest go first when it is full."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self._who, self._mb, self._version = array("i"), array("q"), array("q")
        self._gone = 0  # records that were trimmed
        self._due: deque[tuple[int, Callable[[], Columns]]] = deque()  # the newest records, not written yet

    @classmethod
    def joined(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """The records of several workers, one worker after the other."""
        whole = cls(max(1, sum(len(ledger) for ledger in ledgers)))
        for ledger in ledgers:
            ledger._write()
            first = len(ledger._who) - len(ledger)
            whole._who.extend(ledger._who[first:])
            whole._mb.extend(ledger._mb[first:])
            whole._version.extend(ledger._version[first:])
        return whole

    def __repr__(self) -> str:
        return f"Ledger({len(self)} records, the versions of the weights that every F and B used)"

    def _repr_html_(self) -> str:
        """The grid of stages and micro-batches: the version that F used, an arrow, and the version that B used."""
        self._write()
        newest = max(self._mb, default=-1)
        used: dict[tuple[int, int], dict[str, int]] = {}
        for who, mb, version in zip(self._who[:], self._mb[:], self._version[:], strict=False):
            if mb > newest - SHOWN:
                used.setdefault((who >> 1, mb), {})["FB"[who & 1]] = version
        columns = range(max(0, newest - SHOWN + 1), newest + 1)
        rows = [
            (s, *(f"{cell.get('F', '')} → {cell.get('B', '…')}" if (cell := used.get((s, i))) else "" for i in columns))
            for s in sorted({s for s, _ in used})
        ]
        notes = (
            "Columns are micro-batches. F used the version left of the arrow, and B the one right of it; … where B is "
            "still to come."
        )
        return table(repr(self), ["stage", *map(str, columns)], rows, notes)

    def add(self, kind: str, stages: Sequence[int], mbs: Sequence[int], versions: Sequence[int]) -> None:
        """Add records of one kind, one per stage."""
        if self._due:
            self._write()
        backward = kind == "B"
        self._extend([2 * s + backward for s in stages], mbs, versions)

    def put_off(self, count: int, records: Callable[[], Columns]) -> None:
        """Add `count` records, which `records` returns when somebody looks."""
        self._due.append((count, records))
        while sum(n for n, _ in self._due) - self._due[0][0] >= self.limit:
            self._due.popleft()

    def take(self, count: int) -> Columns:
        """Return the newest records, so many or as many as there are, and drop them."""
        self._write()
        first = max(0, len(self._who) - count)
        newest = self._who[first:], self._mb[first:], self._version[first:]
        for column in (self._who, self._mb, self._version):
            del column[first:]
        return newest

    def _write(self) -> None:
        while self._due:
            self._extend(*self._due.popleft()[1]())

    def _extend(self, who: Sequence[int], mbs: Sequence[int], versions: Sequence[int]) -> None:
        self._who.extend(who)
        self._mb.extend(mbs)
        self._version.extend(versions)
        if len(self._who) >= 2 * self.limit:
            self._trim()

    def _trim(self) -> None:
        self._gone += len(self._who) - self.limit
        for column in (self._who, self._mb, self._version):
            del column[: -self.limit]

    def mark(self) -> int:
        """A number for how far the records go now."""
        self._write()
        return self._gone + len(self._who)

    def go_back(self, mark: int) -> None:
        """Drop all records since the mark."""
        self._write()
        for column in (self._who, self._mb, self._version):
            del column[max(0, mark - self._gone) :]

    def forget(self, first: int) -> None:
        """Drop the newest records, those of the micro-batches from `first` on."""
        self._write()
        n = len(self._mb)
        while n and self._mb[n - 1] >= first:
            n -= 1
        for column in (self._who, self._mb, self._version):
            del column[n:]

    def __len__(self) -> int:
        self._write()
        return min(len(self._who), self.limit)

    def __iter__(self) -> Iterator[Record]:
        for n in range(len(self._who) - len(self), len(self._who)):
            yield Record(self._who[n] >> 1, "FB"[self._who[n] & 1], self._mb[n], self._version[n])

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self._who) - len(self), len(self._who))[index]
        return Record(self._who[at] >> 1, "FB"[self._who[at] & 1], self._mb[at], self._version[at])
