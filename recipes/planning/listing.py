"""Listing: the ranked options of a search as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pipeback.planner.found import HEAD, WORDS, Found


def listed(found: Found, console: Console, top: int) -> None:
    """Print title, table and notes."""
    console.print(found.title, style="bold", highlight=False, markup=False)
    shown, columns = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)), found.columns(top)
    for n in columns:
        style = "bold" if n == 1 else ""
        justify = "left" if n in WORDS else "right"
        shown.add_column(two_lines(HEAD[n]), justify=justify, vertical="bottom", no_wrap=True, style=style)  # type: ignore[arg-type]
    for row in found.rows(top):
        shown.add_row(*(row[n] for n in columns))
    console.print(shown)
    if len(found) > top:
        console.print(f"and {len(found) - top} more; top={len(found)} lists them", style="dim")
    for note in found.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def two_lines(name: str) -> str:
    """The head of a column."""
    return name.replace(" ", "\n", 1) if " " in name else name.replace("-", "-\n", 1)
