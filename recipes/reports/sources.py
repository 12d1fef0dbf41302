"""Sources: reads finished runs from folders of CSV logs, and from W&B by `wandb_runs`.

A folder is a run if it holds metrics.csv (beside hparams.yaml, which has the facts, and config.yaml, the resolved
config) or the file of an offline W&B run. Other folders are searched for such folders.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeback.counts import counted
from pipeback.recipes.reports import wandb_runs
from pipeback.recipes.reports.wandb_runs import Row

DEPTH = 4  # folders below a source: <experiment>/<run>/wandb/offline-run-*


class Run:
    """One run: its facts and its logged numbers.

    facts: flat names (method, seed, stages, delays, ...). rows: logged numbers by column, `step` among them, in order.
    config: the resolved Hydra config, {} if it is not known. origin: where it was found. progress: of a run of a
    comparison, how far it came, such as "running" or "finished"; "" if nobody wrote that.
    """

    def __init__(
        self, facts: dict[str, Any], rows: list[Row], config: dict[str, Any], origin: str, progress: str = ""
    ) -> None:
        self.facts, self.rows, self.config, self.origin, self.progress = facts, rows, config, origin, progress

    def values(self, column: str) -> list[tuple[float, float]]:
        """Return (step, value) of each row in which the column was logged."""
        return [(row["step"], row[column]) for row in self.rows if column in row]

    def last(self, column: str) -> float | None:
        """Return the last value of a column; None if it has none."""
        return next((row[column] for row in reversed(self.rows) if column in row), None)

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @cached_property
    def identity(self) -> str:
        """A text that is the same for a run in two logs: its method, its seed, all its losses and held-out numbers."""
        who = [self.facts.get(name) for name in ("experiment", "method", "method_options", "seed", "optimizer")]
        kept = [[(k, v) for k, v in sorted(row.items()) if k == "step" or "loss" in k or k.startswith("val")]
                for row in self.rows]  # fmt: skip
        measured = [each for each in kept if len(each) > 1]
        return canonical([who, measured or self.origin])


def read(sources: Sequence[Path | str]) -> tuple[list[Run], list[str]]:
    """Return all runs of these folders and wandb:entity/project/group sources, each once, and notes on omissions."""
    found: list[Run] = []
    offline: list[Path] = []
    for source in sources:
        if str(source).startswith("wandb:"):
            found += [Run(facts, rows, {}, origin) for facts, rows, origin in wandb_runs.from_api(str(source))]
            continue
        for folder in folders(Path(source).expanduser()):
            if (folder / "metrics.csv").is_file():
                found.append(from_csv(folder))
            else:
                offline.append(folder)
    for facts, rows, origin in wandb_runs.offline(offline):
        beside = run_around(Path(origin))
        config, progress = (_mapping(beside / "config.yaml"), progress_in(beside)) if beside else ({}, "")
        found.append(Run(facts, rows, config, origin, progress))
    notes = [f"{run.origin} has logged nothing yet and is left out" for run in found if not run.rows]
    once = {run.identity: run for run in reversed(found) if run.rows}
    kept = [run for run in found if once.get(run.identity) is run]
    if not kept:
        raise ValueError(f"nothing was logged in any run of {', '.join(map(str, sources))}")
    if twice := sum(bool(run.rows) for run in found) - len(kept):
        notes.append(f"{counted(twice, 'run')} found twice (same method, seed and numbers) counted once")
    return kept, notes


def folders(source: Path) -> list[Path]:
    """Return the folders of runs at and below this one. Raises ValueError if there are none."""
    if source.is_file() and (source.name == "metrics.csv" or source.suffix == ".wandb"):
        source = source.parent
    if not source.exists():
        raise ValueError(
            f"there is no folder {source}; `pipeback compare` writes its runs to outputs/compare/<experiment>"
        )
    if not source.is_dir():
        raise ValueError(f"{source} is not a run: give the folder that holds metrics.csv, or a folder of such folders")
    found = list(_below(source, DEPTH))
    if not found:
        raise ValueError(
            f"there are no runs in {source}: neither metrics.csv (CSVLogger) nor *.wandb (WandbLogger offline)"
        )
    return found


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "metrics.csv").is_file() or any(folder.glob("*.wandb")):
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):  # without links: W&B's latest-run is a link to another run
            if child.is_dir() and not child.is_symlink() and not child.name.startswith((".", "checkpoints")):
                yield from _below(child, depth - 1)


def from_csv(folder: Path) -> Run:
    """Read a run of Lightning's CSVLogger, whose cells are empty where nothing was logged."""
    file = folder / "metrics.csv"
    with open(file, newline="", encoding="utf-8") as lines:
        rows = list(_numbers(csv.DictReader(lines), file))
    facts, config = _mapping(folder / "hparams.yaml"), _mapping(folder / "config.yaml")
    return Run(facts, rows, config, str(folder), progress_in(folder))


def progress_in(folder: Path) -> str:
    """Return how far the run of a comparison in this folder came; "" for other runs. JSON is YAML, too."""
    return str(_mapping(folder / "progress.json").get("state", ""))


def _numbers(lines: Iterable[dict[str, Any]], file: Path) -> Iterator[Row]:
    for n, line in enumerate(lines, start=2):
        try:
            row = {name: float(cell) for name, cell in line.items() if cell not in (None, "")}
        except (TypeError, ValueError):
            raise ValueError(f"{file} is not a log of CSVLogger: line {n} holds what is not a number") from None
        if "step" not in row:
            raise ValueError(f"{file} is not a log of CSVLogger: line {n} has no step")
        yield row


def _mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; {} if the file is missing."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict | None):
        raise ValueError(f"{file} should hold names and values, but holds a {type(found).__name__}")
    return found or {}


def run_around(folder: Path) -> Path | None:
    """Return the folder <run> of an offline run in <run>/wandb/offline-run-*, if it belongs to this run alone."""
    return folder.parent.parent if len(list(folder.parent.glob("offline-run-*"))) == 1 else None


def canonical(value: Any) -> str:
    """Return the same text for equal values: W&B stores 1.0 as 1."""
    return json.dumps(_floats(value), sort_keys=True, default=str)


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _floats(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_floats(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
