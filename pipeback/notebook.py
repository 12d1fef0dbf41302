"""Notebook: what objects show of themselves in a notebook: plain tables in HTML, and pictures as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path

CELL = "text-align: left; font-variant-numeric: tabular-nums"
MOST = 64  # rows that are shown; a table of a deep model says how many there are


class Drawing:
    """A picture that a notebook shows inline. svg: its text."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Drawing({len(self.svg)} characters of SVG; a notebook shows it, and save('name.svg') writes it)"

    def _repr_svg_(self) -> str:
        return self.svg


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], notes: str = "") -> str:
    """A table in HTML. Every text is escaped, and rows beyond the first 64 are only counted."""
    rows = list(rows)
    if len(rows) > MOST:
        notes = f"{notes} The first {MOST} of {len(rows)} rows are shown.".strip()
    lines = ["".join(f'<td style="{CELL}">{escape(str(cell))}</td>' for cell in row) for row in rows[:MOST]]
    top = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in head)
    return (
        f"<div><strong>{escape(title)}</strong><table><thead><tr>{top}</tr></thead><tbody>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + f"</tbody></table>{escape(notes)}</div>"
    )


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
