"""Live: progress bars for a comparison: one for all runs, and one with its loss for each run in progress."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pipeback.counts import counted
from pipeback.recipes.callbacks import written

COLUMNS = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(),
           TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
ENDS = ("finished", "diverged", "failed", "stopped")


def state(folder: Path) -> dict[str, Any]:
    """Return the last progress that a run has written; {} before it has begun, or if a power cut left no whole file."""
    try:
        return json.loads((folder / "progress.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def broken(runs: Mapping[Path, str]) -> dict[Path, str]:
    """What to say of the runs that have failed or were stopped. runs: folder -> name of the run."""
    how = {"failed": "failed; {} tells how", "stopped": "was stopped; {} tells how, and the same command goes on"}
    told = {out: how.get(state(out).get("state", "")) for out in runs}
    return {out: f"{runs[out]} {text.format(out / 'log.txt')}" for out, text in told.items() if text}


def redraws() -> bool:
    """Whether what is written can be drawn anew in its place: not in files, nor in the cells of a notebook."""
    if sys.stdout is None:  # it was closed before Python began
        return False
    return sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ


class Live:
    """A context in which a thread reads the progress files of the runs. runs: folder -> name of the run."""

    def __init__(self, runs: Mapping[Path, str], console: Console, every: float = 0.3) -> None:
        self.runs, self.every = dict(runs), every
        self.console = console
        shown = console if redraws() else Console(file=console.file, force_terminal=False, width=console.width)
        self.progress = Progress(*COLUMNS, console=shown, redirect_stdout=False, redirect_stderr=False)
        self.tasks: dict[Path, TaskID] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Live:
        self.all = self.progress.add_task(f"[bold]{counted(len(self.runs), 'run')}", total=len(self.runs), note="")
        self.progress.start()
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        self._look()
        self.progress.stop()

    def _watch(self) -> None:
        while not self.stop.wait(self.every):
            self._look()

    def _look(self) -> None:
        for folder, name in list(self.runs.items()):
            found = state(folder)
            if found.get("state") in ENDS:
                self._end(folder, name, found)
            elif found:
                if folder not in self.tasks:
                    self.tasks[folder] = self.progress.add_task(name, total=None, note="")
                note = f"loss {found['loss']:6.3f}" if found.get("loss") is not None else ""
                self.progress.update(
                    self.tasks[folder], completed=found.get("done", 0), total=found.get("of"), note=note
                )

    def _end(self, folder: Path, name: str, found: Mapping[str, Any]) -> None:
        del self.runs[folder]
        if folder in self.tasks:
            self.progress.remove_task(self.tasks.pop(folder))
        self.progress.advance(self.all)
        told = "   ".join(written(k, v) for k, v in found.get("measures", {}).items())
        rate = f"   {found['samples_per_second']:5,.0f} samples/s" if found.get("samples_per_second") else ""
        failed = f"[red]failed: {found.get('error')}"
        end = {"finished": told + rate, "diverged": "[red]diverged", "failed": failed, "stopped": "[red]stopped"}
        self.console.print(f"  {name:<32} {end[found['state']]}", highlight=False, soft_wrap=True)
