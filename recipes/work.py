"""Work: one run of several, whose progress and output go to files."""

from __future__ import annotations

import shutil
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipeback.recipes import forks
from pipeback.recipes.callbacks import ProgressFile, tell
from pipeback.recipes.command import explained
from pipeback.recipes.full_disk import writing
from pipeback.recipes.interrupts import interrupted
from pipeback.recipes.live import state
from pipeback.recipes.sweeps.jobs import last_checkpoint
from pipeback.recipes.train import quiet, run

forks.settled()  # this module is what they import


def resume(values: dict[str, Any]) -> None:
    """Do one run from its last checkpoint, if it has one; the checkpoints of a finished run go."""
    out = Path(values["out"])
    found = last_checkpoint(out)
    work({**values, "ckpt_path": found and str(found)})
    if state(out).get("state") in ("finished", "diverged"):
        shutil.rmtree(out / "checkpoints", ignore_errors=True)


def work(values: dict[str, Any]) -> None:
    """Do one run. It writes its progress to progress.json, and its output to log.txt, to which a resumed run adds."""
    with writing(values["out"]):
        _work(values, Path(values["out"]))


def _work(values: dict[str, Any], out: Path) -> None:
    file = out / "progress.json"
    tell(file, state="running")
    mode = "w" if values["ckpt_path"] is None else "a"
    with open(out / "log.txt", mode) as log, redirect_stdout(log), redirect_stderr(log):
        quiet()
        try:
            found = run(values, [ProgressFile(file)])
        except Exception as error:
            traceback.print_exc()
            tell(file, state="failed", error=explained(error))
        except SystemExit as error:  # Lightning's, if this process alone has heard SIGTERM
            if interrupted(error):
                raise
            traceback.print_exc()
            tell(file, state="stopped")
        else:
            tell(file, state="diverged" if found["diverged"] else "finished", **found)
