"""Curves: the numbers of the pictures as CSV: every held-out measurement, and the monitored values per stage."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from pipeback.recipes.reports.runs import SAMPLES, SECONDS, Method

STAGE = re.compile(r"pipeback/(\w+)/stage_(\d+)$")


def save(methods: Sequence[Method], folder: Path) -> None:
    """Write curves.csv, a line per measurement, and stages.csv, a line per stage and step, if stages were monitored."""
    metric = methods[0].metric.column
    shown = ["step", SAMPLES, SECONDS, metric, *(["val/loss"] if metric != "val/loss" else [])]
    with open(folder / "curves.csv", "w", newline="", encoding="utf-8") as lines:
        table = csv.writer(lines)
        table.writerow(["method", "seed", *shown])
        for m in methods:
            for run in m.runs:
                for row in run.rows:
                    if metric in row:
                        table.writerow([m.label, run.facts.get("seed"), *(row.get(name) for name in shown)])
    found, kinds = stages(methods)
    if found:
        with open(folder / "stages.csv", "w", newline="", encoding="utf-8") as lines:
            table = csv.writer(lines)
            table.writerow(["method", "seed", "step", "stage", *kinds])
            for key, values in found.items():
                table.writerow([*key, *(values.get(kind) for kind in kinds)])


def stages(methods: Sequence[Method]) -> tuple[dict[tuple[object, ...], dict[str, float]], list[str]]:
    """Return (method, seed, step, stage) -> value by kind (delay, gap, ...), and the kinds."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    kinds: dict[str, None] = {}
    for m in methods:
        for run in m.runs:
            matched = [(name, match) for name in run.columns if (match := STAGE.match(name))]
            for row in run.rows:
                for name, match in matched:
                    if name in row:
                        key = (m.label, run.facts.get("seed"), row["step"], int(match[2]))
                        found.setdefault(key, {})[match[1]] = row[name]
                        kinds[match[1]] = None
    return found, list(kinds)
