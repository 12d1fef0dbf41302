"""Sheet: a table of methods, as text for the page, the terminal and Markdown, and as numbers for CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from pipeback.recipes.markdown import table as in_markdown
from pipeback.recipes.reports.metric import mean_and_deviation, spread
from pipeback.recipes.reports.runs import Method

Numbers = Callable[[Method], Sequence[float]]


class Column(NamedTuple):
    """A column. name: with its unit, on two lines. numbers: one per seed. text: the cell, if not mean and spread."""

    name: str
    numbers: Numbers
    form: str = ".3g"
    scale: float = 1.0
    text: Callable[[Method], str] | None = None

    def cell(self, method: Method) -> str:
        return self.text(method) if self.text else spread(self.numbers(method), self.form, self.scale)


class Sheet(NamedTuple):
    """A table. head, rows: texts. numbers: the rows of the CSV file, with its own head first."""

    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    numbers: list[list[object]]
    notes: str


def sheet(name: str, title: str, methods: Sequence[Method], shown: Sequence[Column], notes: str,
           dagger: bool = True) -> Sheet:  # fmt: skip
    """Return a table of methods. dagger: mark unstable methods with a dagger."""
    shown = [c for c in shown if c.text or any(c.numbers(m) for m in methods)]
    marked = [m for m in methods if dagger and m.unstable]
    if marked:
        notes += " † held-out loss ends above that of guessing: unstable at this rate with this delay."
    rows = [[m.label + (" †" if m in marked else ""), *(c.cell(m) for c in shown)] for m in methods]
    return Sheet(name, title, ["method", *(c.name for c in shown)], rows, _numbers(methods, shown), notes)


def _numbers(methods: Sequence[Method], shown: Sequence[Column]) -> list[list[object]]:
    """Return a mean and, if seeds differ, a deviation per column; empty cells where there is none."""
    found: list[list[object]] = [["method", "runs"], *([m.label, len(m.runs)] for m in methods)]
    for c in shown:
        pairs = [
            mean_and_deviation([c.scale * n for n in c.numbers(m)]) if c.numbers(m) else (None, None) for m in methods
        ]
        plain = " ".join(c.name.split())
        for name, column in zip((plain, f"{plain} deviation"), zip(*pairs, strict=True), strict=True):
            if any(value is not None for value in column):
                for line, value in zip(found, (name, *column), strict=True):
                    line.append(value)
    return found


def terminal(table: Sheet) -> Table:
    """Return the table for the terminal, without its notes."""
    shown = Table(title=table.title, box=box.SIMPLE_HEAD, pad_edge=False)
    for n, name in enumerate(table.head):
        shown.add_column(name, justify="right" if n else "left", style="" if n else "bold", vertical="bottom",
                         overflow="fold", no_wrap=not n)  # fmt: skip
    for row in table.rows:
        shown.add_row(*(f"[red]{cell}" if cell == "diverged" else escape(cell) for cell in row))
    return shown


def markdown(table: Sheet) -> str:
    written = in_markdown([name.replace("\n", " ") for name in table.head], table.rows)
    return "\n".join([f"## {table.title}", "", written, "", table.notes, ""])


def save(table: Sheet, file: Path) -> None:
    with open(file, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(table.numbers)
