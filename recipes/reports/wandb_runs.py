"""W&B runs: reads runs of Weights & Biases: offline ones from their folders, others through the API.

`wandb leet inspect --json`, W&B's own reader, reads offline files in one process per run of two thirds of a second, so
several run at once. Rows and facts are those of a CSV log, without W&B's own names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

READERS = 4
STEP = "trainer/global_step"  # the name of the step in Lightning's WandbLogger
Row = dict[str, float]
Logged = tuple[dict[str, Any], list[Row], str]  # facts, rows, where it was found


def offline(folders: Sequence[Path]) -> list[Logged]:
    if folders:
        need_wandb(f"{folders[0]} is an offline W&B run: reading it")
    with ThreadPoolExecutor(READERS) as pool:
        return [(*parsed(lines, folder), str(folder)) for folder, lines in zip(folders, pool.map(inspect, folders))]


def inspect(folder: Path) -> str:
    """Return the records of the run, one JSON object per line."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(next(folder.glob("*.wandb")))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ValueError(f"{folder} is not an offline W&B run that can be read: {said or 'wandb leet inspect failed'}")
    return done.stdout


def parsed(lines: str, folder: Path) -> tuple[dict[str, Any], list[Row]]:
    facts: dict[str, Any] = {}
    rows = []
    try:
        for record in map(json.loads, filter(None, lines.splitlines())):
            if record["type"] == "config":
                facts |= record["config"].get("update", {})
            elif record["type"] == "history":
                rows.append(row(record["history"]["item"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: `wandb leet inspect` of this wandb version answers in another form") from error
    return own(facts), [r for r in rows if r]


def from_api(source: str) -> list[Logged]:
    """Return the runs of wandb:entity/project, or of one group of them: wandb:entity/project/group."""
    entity, _, rest = source.removeprefix("wandb:").partition("/")
    project, _, group = rest.partition("/")
    if not entity or not project:
        raise ValueError(f"{source!r} names no runs: write wandb:entity/project or wandb:entity/project/group")
    need_wandb(source)
    import wandb

    found: list[Logged] = []
    try:
        for run in wandb.Api().runs(f"{entity}/{project}", filters={"group": group} if group else {}):
            rows = [r for item in run.scan_history() if (r := row(item))]
            found.append((own(dict(run.config)), rows, f"{source}: {run.name}"))
    except (wandb.Error, ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{source} cannot be read: {said} (private projects need `wandb login`)") from error
    if not found:
        raise ValueError(f"{source}: there are no runs" + (f" of the group {group!r}" if group else ""))
    return found


def row(item: Mapping[str, Any]) -> Row:
    """Return numbers by column; {} for a row that has only media. NaN and infinity come as texts."""
    found: Row = {}
    for name, value in item.items():
        if name.startswith("_") or isinstance(value, bool | None):
            continue
        try:
            found["step" if name == STEP else name] = float(value)
        except (TypeError, ValueError):
            continue  # a table or an image
    if found and "step" not in found:
        found["step"] = float(item.get("_step", 0))
    return found


def own(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def need_wandb(what: str) -> None:
    if find_spec("wandb") is None:
        raise ValueError(f"{what} needs wandb: pip install 'pipeback[wandb]'")
