"""The results of the section `table`: as a file, as text, and as the tables that docs/results/speed.md shows.

The file holds what was measured, samples per second of every round; everything that is printed is computed from it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeback.recipes.benches.turns import spread
from pipeback.recipes.markdown import table
from pipeback.recipes.provenance import heading

FILE = Path(__file__).parents[2] / "docs" / "results" / "data" / "speed" / "table.json"
TABLES = FILE.with_suffix(".md")  # what docs/results/speed.md shows
PLAIN, IDEAL = "plain", "apart"  # the rows that the others are compared with
NONE = "–"


class Row(NamedTuple):
    """A contender on one network and micro-batch."""

    name: str
    label: str
    workers: int
    update: int  # samples
    rates: list[float]  # samples per second, one number per round; empty: not measured, see note
    peak_mb: list[float | None]  # of every rank
    note: str = ""
    # of every rank, too; earlier files have none
    held_mb: Sequence[float | None] = ()
    declared_mb: Sequence[float | None] = ()


class Goal(NamedTuple):
    """What one contender shall reach of another, the better one if there are several."""

    words: str
    name: str
    others: Sequence[str]
    wanted: str


GOALS = (
    Goal('`pb`, "auto", of the plain loop fused', "auto", ("fused",),
         "1.0; narrow 8; transformer at 1 1.8; resnet20 and vgg16 at 1 1.25"),
    Goal('`cerebras`, "auto", of `pb`, "auto"', "cerebras_auto", ("auto",), "0.8"),
    Goal("`pb`, 2 ranks, of torch's better schedule", "ranks", ("torch_gpipe", "torch_1f1b"), "1.05"),
    Goal('`pb`, "auto", 2 ranks, of one process', "ranks_auto", ("auto",), "narrow and transformer 1.6"),
)  # fmt: skip


class Case(NamedTuple):
    network: str
    words: str
    stages: int
    parameters: int
    micro_batch: int  # samples
    turn: int  # micro-batches
    rows: list[Row]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def ratios(self, row: Row, name: str) -> list[float]:
        """Return rates over those of another row in the same rounds; the ideal counts once per worker."""
        times = row.workers if name == IDEAL else 1
        return [a / (times * b) for a, b in zip(row.rates, self.row(name).rates, strict=True)] if row.rates else []

    def reached(self, goal: Goal) -> list[float]:
        """The ratios of a goal, of the same rounds; none if a contender was not measured."""
        rows = {row.name: row for row in self.rows if row.rates}
        there = [rows[name] for name in goal.others if name in rows]
        if goal.name not in rows or not there:
            return []
        better = max(there, key=lambda row: statistics.median(row.rates))
        return self.ratios(rows[goal.name], better.name)


class Results(NamedTuple):
    machine: dict[str, Any]  # of recipes/provenance.py, and `threads`, `load` and `command`
    repeats: int
    seconds: float  # of the whole run
    cases: list[Case]


# -- the file ----------------------------------------------------------------------------------------------------------


def save(found: Results, path: str | Path) -> None:
    """Write all numbers as JSON, or, where the path ends in .md, the tables of the page."""
    if Path(path).suffix == ".md":
        Path(path).write_text(tables(found), "utf-8")
        return
    cases = [case._asdict() | {"rows": [_plain(row) for row in case.rows]} for case in found.cases]
    Path(path).write_text(json.dumps(found._asdict() | {"cases": cases}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _plain(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row._asdict().items() if value != ()}


def load(path: str | Path) -> Results:
    try:
        known = json.loads(Path(path).read_text("utf-8"))
        cases = [Case(**case | {"rows": [Row(**row) for row in case["rows"]]}) for case in known["cases"]]
        return Results(**known | {"cases": cases})
    except OSError as error:
        sys.exit(f"pipeback bench: read={path}: {error.strerror}")
    except (ValueError, TypeError, KeyError) as error:
        sys.exit(f"pipeback bench: read={path} is no file of `pipeback bench table out=`: {error!r}")


# -- to be read --------------------------------------------------------------------------------------------------------


def of(ratios: Sequence[float]) -> str:
    """The median of the ratios and their spread."""
    return spread(ratios) if ratios else NONE


def cells(case: Case, row: Row) -> list[str]:
    """The cells samples/s, of plain, of ideal, peak MB, update."""
    speed = f"{statistics.median(row.rates):,.1f}" if row.rates else NONE
    use = [each_rank(row.peak_mb), each_rank(row.held_mb), each_rank(row.declared_mb)]
    return [speed, of(case.ratios(row, PLAIN)), of(case.ratios(row, IDEAL)), *use, str(row.update)]


def each_rank(some: Sequence[float | None]) -> str:
    """MB of every rank; nothing where no rank has a number."""
    told = [NONE if mb is None else f"{mb:.0f}" for mb in some]
    return " + ".join(told) if any(mb is not None for mb in some) else NONE


COLUMNS = ["samples/s", "of plain", "of ideal", "peak MB", "held", "declared", "update"]


def goals(found: Results) -> str:
    """The goals as a table: a row per goal, and a column per network and micro-batch."""
    rows = [[goal.words, goal.wanted, *(of(case.reached(goal)) for case in found.cases)] for goal in GOALS]
    heads = [f"{case.network}, {case.micro_batch}" for case in found.cases]
    return table(["of the same round", "goal", *heads], [row for row in rows if set(row[2:]) != {NONE}], left=(0, 1))


def title(case: Case) -> str:
    return f"{case.words}, {case.stages} stages, micro-batch {case.micro_batch}"


def text(found: Results) -> str:
    """The results as text for the terminal."""
    lines = [heading(found.machine["command"], found.machine), medians(found)]
    for case in found.cases:
        lines += ["", title(case), line("", COLUMNS)]
        lines += [line(row.label.replace("`", ""), cells(case, row)) for row in case.rows]
        lines += [f"  {row.label.replace('`', '')}: {row.note}" for row in case.rows if row.note]
    return "\n".join([*lines, "", goals(found)])


def line(label: str, columns: Sequence[str]) -> str:
    widths = (12, 22, 22, 12, 12, 12, 8)
    return f"{label:<34}" + "".join(f"{cell:>{width}}" for cell, width in zip(columns, widths, strict=True))


def medians(found: Results) -> str:
    return f"Medians of {found.repeats} interleaved turns (smallest … largest)."


def tables(found: Results) -> str:
    """The tables of docs/results/speed.md: contenders over the plain loop, then everything."""
    first: dict[str, str] = {}
    for case in found.cases:
        first |= {row.name: row.label for row in case.rows if row.name not in first}
    heads = [f"{case.network}, {case.micro_batch}" for case in found.cases]
    rows = []
    for name, label in first.items():
        mine = [next((row for row in case.rows if row.name == name), None) for case in found.cases]
        cells_ = [of(case.ratios(row, PLAIN)) if row else NONE for case, row in zip(found.cases, mine, strict=True)]
        rows.append([label, *cells_])
    about = {
        case.network: f"{case.words}, {case.stages} stages, {case.parameters:,} parameters" for case in found.cases
    }
    lines = [heading(found.machine["command"], found.machine), table(["of plain, at micro-batch", *heads], rows), ""]
    lines += [*(f"* {name}: {words}" for name, words in about.items()), "", medians(found), ""]
    lines += ["### Goals", "", goals(found), ""]
    lines += ["### Samples per second, over the ideal, peak memory"]
    for case in found.cases:
        head = [f"{case.network}, micro-batch {case.micro_batch}", *COLUMNS]
        lines += ["", table(head, [[row.label, *cells(case, row)] for row in case.rows])]
        notes = [f"{row.label}: {row.note}." for row in case.rows if row.note]
        lines += ["", " ".join(notes)] if notes else []
    return "\n".join([*lines, ""])


def publish(found: Results) -> None:
    """Write the files that the page shows."""
    if not FILE.parents[1].is_dir():
        sys.exit(f"pipeback bench: page=true: there is no folder {FILE.parents[1]}; run it where pipeback is developed")
    FILE.parent.mkdir(exist_ok=True)
    save(found, FILE)
    TABLES.write_text(tables(found), "utf-8")
