"""Limits: the largest stable ηλ of methods by momentum and delay, as a CSV file, tables, and beside experiments.

    # COMMAND
    # date: …, commit: …, pipeback: …, machine: …, torch: …
    method,momentum,delay,limit,theory

limit is the observed one; theory is that of the characteristic polynomial, empty where none is known.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeback.methods.momentum import scale_hyperparameters
from pipeback.recipes.reports.sheet import Sheet
from pipeback.recipes.stability.observed import GRID, largest
from pipeback.recipes.stability.polynomials import LAWS

MOMENTA = (0.9, 0.99, 0.999)
DELAYS = (4, 16, 64)
HEAD = ("method", "momentum", "delay", "limit", "theory")
RANGE = 1 / 4, 200.0  # of what is tried, over the limit of pb


class Row(NamedTuple):
    """One method at one momentum and delay."""

    method: str
    momentum: float
    delay: int
    limit: float
    theory: float


class Limits(NamedTuple):
    """A file. facts: date, commit, versions and machine."""

    command: str
    facts: dict[str, str]
    rows: list[Row]

    def over_pb(self, row: Row) -> float:
        """The limit over that of pb at the same momentum and delay."""
        same = (other for other in self.rows if other[:3] == ("pb", *row[1:3]))
        return row.limit / next(same).limit


class Experiment(NamedTuple):
    """An experiment with momentum SGD: S stages, and the reference whose rate and momentum are scaled to `size`."""

    name: str
    rate: float
    reference: int
    size: int
    stages: int

    @property
    def delay(self) -> int:
        return 2 * (self.stages - 1)

    @property
    def scaled(self) -> tuple[float, float]:
        """The rate and the momentum of an update of `size` samples."""
        return scale_hyperparameters(self.rate, 0.9, reference=self.reference, size=self.size)


EXPERIMENTS = (
    Experiment("experiment=digits", 0.1, 32, 1, 20),
    Experiment("experiment=fashion_mnist", 0.03, 128, 4, 20),
    Experiment("experiment=cifar10", 0.1, 128, 8, 20),
    Experiment("Kosson et al., ResNet-20", 0.1, 128, 1, 34),
    Experiment("Kosson et al., ResNet-110", 0.1, 128, 1, 169),
)


def measure(momenta: Sequence[float], delays: Sequence[int], methods: Iterable[str], tell: Callable[[Row], Any],
            known: Sequence[Row] = ()) -> list[Row]:  # fmt: skip
    """Observe every method at every momentum and delay. known: rows that were observed before. tell: hears each row."""
    found = []
    for m in momenta:
        for d in delays:
            plain = LAWS["pb"].largest(m, d)
            for method in methods:
                row = next((row for row in known if row[:3] == (method, m, d)), None)
                if row is None:
                    theory = LAWS[method].largest(m, d) if method in LAWS else math.nan
                    row = Row(method, m, d, largest(method, m, d, RANGE[0] * plain, RANGE[1] * plain), theory)
                found.append(row)
                tell(row)
    return found


def save(file: Path, limits: Limits) -> None:
    """Write the file as a whole."""
    text = io.StringIO()
    text.write(f"# {limits.command}\n# {', '.join(f'{name}: {value}' for name, value in limits.facts.items())}\n")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEAD)
    for row in limits.rows:
        lines.writerow([*row[:3], f"{row.limit:.4g}", "" if math.isnan(row.theory) else f"{row.theory:.4g}"])
    part = file.with_suffix(".part")
    part.write_text(text.getvalue(), "utf-8")
    part.replace(file)


def holds(text: str) -> bool:
    """Whether the text of a file is one of limits."""
    return ",".join(HEAD) in text.splitlines()[:3]


def read(text: str) -> Limits:
    """Read the text of a file for which `holds` is true."""
    lines = text.splitlines()
    command, told = (line.removeprefix("# ") for line in lines[:2])
    facts = dict(part.split(": ", 1) for part in re.split(r", (?=\w[\w -]*: )", told))
    rows = [
        Row(line["method"], float(line["momentum"]), int(line["delay"]), float(line["limit"]),
            float(line["theory"] or "nan")) for line in csv.DictReader(lines[2:])
    ]  # fmt: skip
    return Limits(command, facts, rows)


def sheets(limits: Limits) -> list[Sheet]:
    """The tables: observed beside theory, and what experiments allow."""
    return [_observed(limits), _experiments()]


def _observed(limits: Limits) -> Sheet:
    methods = list(dict.fromkeys(row.method for row in limits.rows))
    cases = list(dict.fromkeys((row.momentum, row.delay) for row in limits.rows))
    cells = {row[:3]: row for row in limits.rows}
    rows = []
    for m, d in cases:
        plain, others = cells["pb", m, d], [cells.get((method, m, d)) for method in methods if method != "pb"]
        ratios = ["–" if row is None else f"{limits.over_pb(row):.2f}" for row in others]
        rows.append([f"{m:g}", f"{d}", f"{d * (1 - m):.3g}", f"{plain.limit:.3g}", *ratios])
    known = [row for row in limits.rows if not math.isnan(row.theory)]
    off = max((abs(row.limit / row.theory - 1) for row in known), default=math.nan)
    notes = (
        f"D is the delay in updates, m the momentum. The column pb is ηλ itself, the others are over it: above 1 a "
        f"method is stable at larger rates than plain pipelined backpropagation. {GRID - 1:.1%} lie between two values "
        f"that were tried; the polynomials of {', '.join(LAWS)} give limits that differ by at most {off:.1%}."
    )
    head = ["momentum", "D", "D(1−m)", "pb: ηλ", *(method for method in methods if method != "pb")]
    return Sheet("limits", "Largest stable ηλ, observed", head, rows, [list(HEAD), *map(list, limits.rows)], notes)


def _experiments() -> Sheet:
    shown = ("pb", "sc", "lwp", "cerebras")
    rows, numbers = [], []
    for some in EXPERIMENTS:
        rate, m = some.scaled
        curvatures = [LAWS[method].largest(m, some.delay) / rate for method in shown]
        rows.append([some.name, f"{rate:.3g}", f"{m:.5f}", f"{some.delay}", f"{some.delay * (1 - m):.3f}",
                     *(f"{c:.3g}" for c in curvatures)])  # fmt: skip
        numbers.append([some.name, rate, m, some.delay, *curvatures])
    notes = (
        "λ is the curvature of the loss, of one sample as the mean of a batch has it, up to which stage 0 is stable at "
        "the rate η and momentum m of the experiment, by the polynomials."
    )
    head = ["experiment", "η", "m", "D", "D(1−m)", *(f"{method}: λ" for method in shown)]
    return Sheet("experiments", "Where the experiments lie", head, rows, [["experiment", "rate", "momentum", "delay",
                 *shown], *numbers], notes)  # fmt: skip
