"""Notebook: what objects show of themselves in a notebook: plain tables in HTML, and pictures as SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path

WORDS, NUMBERS = "text-align: left", "text-align: right; font-variant-numeric: tabular-nums"
FIRST, LAST = 16, 8  # rows that a long table shows of its two ends
NUMBER = re.compile(r"(?:[-+]?[\d.,]+(?:e[-+]?\d+)?%?(?: [µmkKMGT]?i?[Bs])?|–)?")  # or nothing


class Drawing:
    """A picture that a notebook shows inline. svg: its text."""

    def __init__(self, svg: str) -> None:
        self.svg = svg.replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Drawing({len(self.svg)} characters of SVG; a notebook shows it, and save('name.svg') writes it)"

    def _repr_svg_(self) -> str:
        return self.svg


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], notes: str = "") -> str:
    """A table in HTML, columns of numbers to the right. Every text is escaped; of many rows the two ends are shown."""
    texts = [[str(cell) for cell in row] for row in rows]
    styles = [NUMBERS if texts and all(map(NUMBER.fullmatch, column)) else WORDS for column in zip(*texts, strict=True)]
    styles = styles or [WORDS for _ in head]
    more = len(texts) - FIRST - LAST
    shown = texts if more <= 1 else [*texts[:FIRST], [f"… {more:,} more", *[""] * (len(head) - 1)], *texts[-LAST:]]
    lines = [
        "".join(f'<td style="{style}">{escape(cell)}</td>' for style, cell in zip(styles, row, strict=True))
        for row in shown
    ]
    top = "".join(f'<th style="{style}">{escape(name)}</th>' for style, name in zip(styles, head, strict=True))
    return (
        '<div style="overflow-x: auto">'
        f"<strong>{escape(title)}</strong><table><thead><tr>{top}</tr></thead><tbody>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + f"</tbody></table>{escape(notes)}</div>"
    )


def seconds(value: float) -> str:
    """A time in three digits, with the unit that suits it.

    >>> seconds(0.00866), seconds(12.0)
    ('8.66 ms', '12 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size or not value:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def number(value: float) -> str:
    """A measured number in three digits; a dash for NaN, which stands for what was not measured.

    >>> number(0.12345), number(float("nan"))
    ('0.123', '–')
    """
    return "–" if value != value else f"{value:.3g}"


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Drawing:
    """A picture of one bar per row, as long as its number. rows: (name, number, what is written beside the bar)."""
    longest = max((size for _, size, _ in rows), default=0.0) or 1.0
    left = 12 + 7 * max((len(name) for name, _, _ in rows), default=0)
    lines = [f'<text x="6" y="18" font-weight="bold">{escape(title)}</text>']
    for n, (name, size, text) in enumerate(rows):
        top = 30 + 22 * n
        lines.append(
            f'<g><title>{escape(f"{name}: {text}")}</title><text x="6" y="{top + 13}">{escape(name)}</text>'
            f'<rect x="{left}" y="{top}" width="{max(1.0, 300 * size / longest):.1f}" height="17" fill="#8fb4dc"/>'
            f'<text x="{left + 6}" y="{top + 13}">{escape(text)}</text></g>'
        )
    wide = max(left + 320, 20 + 8 * len(title))
    high = 38 + 22 * len(rows)
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(lines)}</svg>'
    )
