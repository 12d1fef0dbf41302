"""The results of the section `table`: as a file, as text, and as tables of docs/results/speed.md.

The file holds what was measured, samples per second of every round; everything that is printed is computed from it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FILE = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "speed.md"
BEGIN, END = "<!-- written by `pipeback bench table page=true`: do not edit -->", "<!-- end of what it wrote -->"
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


class Results(NamedTuple):
    machine: dict[str, Any]
    repeats: int
    seconds: float  # of the whole run
    cases: list[Case]


def machine() -> dict[str, Any]:
    """The machine, the versions of packages, and the load before the run."""
    return {
        "date": datetime.date.today().isoformat(), "cpu": cpu(), "cores": os.cpu_count(), "threads": 1,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.system(),
    }  # fmt: skip


def cpu() -> str:
    told = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", told.read_text()) if told.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


# -- the file ----------------------------------------------------------------------------------------------------------


def save(found: Results, path: str | Path) -> None:
    cases = [case._asdict() | {"rows": [row._asdict() for row in case.rows]} for case in found.cases]
    Path(path).write_text(json.dumps(found._asdict() | {"cases": cases}, indent=1, ensure_ascii=False) + "\n", "utf-8")


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
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})" if ratios else NONE


def cells(case: Case, row: Row) -> list[str]:
    """The cells samples/s, of plain, of ideal, peak MB, update."""
    speed = f"{statistics.median(row.rates):,.1f}" if row.rates else NONE
    peak = " + ".join(NONE if mb is None else f"{mb:.0f}" for mb in row.peak_mb) or NONE
    return [speed, of(case.ratios(row, PLAIN)), of(case.ratios(row, IDEAL)), peak, str(row.update)]


COLUMNS = ["samples/s", "of plain", "of ideal", "peak MB", "update"]


def title(case: Case) -> str:
    return f"{case.words}, {case.stages} stages, micro-batch {case.micro_batch}"


def text(found: Results) -> str:
    """The results as text for the terminal."""
    lines = [under(found)]
    for case in found.cases:
        lines += ["", title(case), line("", COLUMNS)]
        lines += [line(row.label.replace("`", ""), cells(case, row)) for row in case.rows]
        lines += [f"  {row.label.replace('`', '')}: {row.note}" for row in case.rows if row.note]
    return "\n".join(lines)


def line(label: str, columns: Sequence[str]) -> str:
    widths = (12, 22, 22, 12, 8)
    return f"{label:<34}" + "".join(f"{cell:>{width}}" for cell, width in zip(columns, widths, strict=True))


def under(found: Results) -> str:
    """A sentence that says on what machine this was measured."""
    m = found.machine
    load = "" if m.get("load") is None else f", load {m['load']} before"
    return (
        f"Medians of {found.repeats} interleaved turns (smallest … largest), {m['cores']} cores of {m['cpu']}, "
        f"{m['threads']} intra-op thread per process, torch {m['torch']}, Python {m['python']}, {m['date']}{load}"
    )


def block(found: Results) -> str:
    """The tables of docs/results/speed.md: contenders over the plain loop, then everything."""
    first: dict[str, str] = {}
    for case in found.cases:
        first |= {row.name: row.label for row in case.rows if row.name not in first}
    heads = [f"{case.network}, {case.micro_batch}" for case in found.cases]
    lines = [BEGIN, "", row_of(["of plain, at micro-batch", *heads]), rule(len(heads))]
    for name, label in first.items():
        mine = [next((row for row in case.rows if row.name == name), None) for case in found.cases]
        cells_ = [of(case.ratios(row, PLAIN)) if row else NONE for case, row in zip(found.cases, mine, strict=True)]
        lines.append(row_of([label, *cells_]))
    about = {
        case.network: f"{case.words}, {case.stages} stages, {case.parameters:,} parameters" for case in found.cases
    }
    lines += ["", *(f"* {name}: {words}" for name, words in about.items())]
    lines += ["", under(found) + ".", "", "### Samples per second, over the ideal, peak memory"]
    for case in found.cases:
        lines += ["", row_of([f"{case.network}, micro-batch {case.micro_batch}", *COLUMNS]), rule(len(COLUMNS))]
        lines += [row_of([row.label, *cells(case, row)]) for row in case.rows]
        notes = [f"{row.label}: {row.note}." for row in case.rows if row.note]
        lines += ["", " ".join(notes)] if notes else []
    return "\n".join([*lines, "", END])


def row_of(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def rule(numbers: int) -> str:
    return row_of(["---", *["---:"] * numbers])


def between(document: str) -> str:
    """The generated block of the document, including its marks."""
    begin, end = document.find(BEGIN), document.find(END)
    if begin < 0 or end < begin:
        sys.exit(f"pipeback bench: page=true: {PAGE} has no line {BEGIN!r} with {END!r} behind it; run it there "
                 "where pipeback is developed")  # fmt: skip
    return document[begin : end + len(END)]


def into_page(found: Results) -> None:
    document = PAGE.read_text("utf-8") if PAGE.exists() else ""
    PAGE.write_text(document.replace(between(document), block(found)), "utf-8")
