"""Tables of finished runs: as rows, for the terminal, and in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rich import box
from rich.table import Table

from pipeback.recipes.runs import Method, spread


class Column(NamedTuple):
    name: str
    cell: Callable[[Method], str]


class Sheet(NamedTuple):
    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    notes: str


def tables(methods: list[Method]) -> list[Sheet]:
    """Every method at its own delay; and at equal delay, if there are runs made for that."""
    seeds = max(len(m.results) for m in methods)
    over = f" Mean ± standard deviation over {seeds} seeds." if seeds > 1 else ""
    micro = next((int(n) for m in methods for n in m.number("bubble_micro_batches")), 0)
    stages = methods[0].head["stages"]
    notes = (
        f"Accuracy and loss on held-out data.{over} Update size: samples an update. D: own updates between forward "
        f"and gradient, at the first of {stages} stages. Weight copies: live and kept versions or scratch, at the "
        f"peak; method state, in copies of the weights, is counted apart. Activations: of micro-batches in flight, at "
        f"the peak. Bubble: idle share of the schedule over {micro:,} micro-batches, one worker a stage, F and B of "
        f"equal length. Samples/s: in one process on one thread, two at a time unless jobs=1; they compare methods, "
        f"not schedules."
    )
    own = [m for m in methods if not m.equal_slack]
    found = [_sheet("methods", "Every method at its own delay", own or methods, False, notes)]
    if any(m.equal_slack for m in methods):
        text = f"All flowing methods at slack 2, that is, at the delay of pb; sgd for reference.{over}"
        equal = [m for m in methods if m.equal_delay or m.base == "sgd"]
        found.append(_sheet("equal_delay", "At equal delay", equal, True, text))
    return found


def _sheet(name: str, title: str, methods: list[Method], equal: bool, notes: str) -> Sheet:
    shown = columns(methods, equal)
    if any(m.unstable for m in methods):
        notes += " † held-out loss ends above that of guessing: unstable at this rate with this delay."
    return Sheet(name, title, [c.name for c in shown], [[c.cell(m) for c in shown] for m in methods], notes)


def columns(methods: list[Method], equal: bool) -> list[Column]:
    """Name and unit over two lines; at equal delay, those alone that the delay changes."""

    def accuracy(m: Method, epoch: int) -> str:
        if m.diverged and epoch == epochs:
            return "diverged" if len(m.results) == 1 else f"{m.diverged} of {len(m.results)} diverged"
        return spread(m.after(epoch), ".1f", 100)

    epochs = max(m.epochs for m in methods)
    copies = Column("weight\ncopies", lambda m: spread(m.number("copies")[:1], ".3g"))
    activations = Column("activations\nMB", lambda m: spread(m.number("activations")[:1], ".3f", 1e-6))
    found = [
        Column("method", lambda m: m.label + (" †" if m.unstable else "")),
        Column("update\nsize", lambda m: str(m.head["update_size"])),
        Column("D at\nstage 0", lambda m: str(m.head["delays"][0])),
        *(Column(f"accuracy %\nepoch {e}", partial(accuracy, epoch=e)) for e in range(1, epochs + 1)),
        Column("loss", lambda m: spread(m.after(epochs, "loss"), ".3f" if len(m.results) == 1 else ".2f")),
    ]
    if equal:
        return [*found, copies, activations]
    return [
        *found,
        Column("samples/s", lambda m: format(statistics.fmean(m.number("samples_per_second") or [math.nan]), ",.0f")),
        copies,
        Column("method\nstate", lambda m: spread(m.number("state")[:1], ".3g")),
        activations,
        Column("bubble\n%", lambda m: spread(m.number("bubble")[:1], ".1f", 100)),
    ]


def terminal(table: Sheet) -> Table:
    shown = Table(title=table.title, box=box.SIMPLE_HEAD, caption=table.notes, caption_justify="left", pad_edge=False)
    for n, name in enumerate(table.head):
        shown.add_column(name, justify="right" if n else "left", style="" if n else "bold", vertical="bottom",
                         overflow="fold", no_wrap=not n)  # fmt: skip
    for row in table.rows:
        shown.add_row(*(f"[red]{cell}" if "diverged" in cell else cell for cell in row))
    return shown


def markdown(table: Sheet) -> str:
    lines = [f"## {table.title}", "", "| " + " | ".join(table.head).replace("\n", " ") + " |"]
    lines.append("| --- |" + " ---: |" * (len(table.head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([*lines, "", table.notes, ""])
