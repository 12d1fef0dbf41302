"""Tables in Markdown, in columns of one width, so that they can be read where they are printed, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """left: the columns of words; the others are numbers."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width if n in left else "-" * (width - 1) + ":" for n, width in enumerate(widths)]

    def written(cells: Sequence[str]) -> str:
        padded = (f"{cell:<{w}}" if n in left else f"{cell:>{w}}" for n, (cell, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(written, (lines[0], rule, *lines[1:])))
