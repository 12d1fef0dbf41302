"""Logs: prepares the loggers of a run before it begins, and closes them after it has ended."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from pipeback.lightning.checkpoint_file import CheckpointFile

AXES = ("samples_seen", "wall_time")  # x axes that W&B offers besides the step


def begin(loggers: Iterable[Logger], facts: Mapping[str, Any], ckpt_path: str | None) -> None:
    """Log the facts; a run that resumes from a checkpoint keeps the rows from before it."""
    for logger in loggers:
        before = rows_before(ckpt_path, Path(logger.log_dir)) if isinstance(logger, CSVLogger) else []
        with reachable(logger):
            logger.log_hyperparams(dict(facts))
        for step, row in before:
            logger.log_metrics(row, step)
        if isinstance(logger, WandbLogger):
            for axis in AXES:
                logger.experiment.define_metric(axis)


@contextmanager
def reachable(logger: Logger) -> Iterator[None]:
    """A context in which W&B's own errors, as before a login, are mistakes in the input."""
    try:
        yield
    except Exception as error:
        if not isinstance(logger, WandbLogger) or not type(error).__module__.startswith("wandb."):
            raise
        raise ValueError(
            f"logger: W&B says {str(error)!r}; without it, give logger=wandb_offline or logger=csv"
        ) from error


def rows_before(ckpt_path: str | None, folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows in this folder from before the checkpoint of a resumed run, which Lightning would delete."""
    log = folder / "metrics.csv"
    if ckpt_path is None or not log.is_file():
        return []
    step = CheckpointFile().load_checkpoint(ckpt_path, weights_only=True)["global_step"]
    with open(log, newline="") as lines:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return [(int(row.pop("step")), row) for row in rows if row["step"] < step]


def end(loggers: Iterable[Logger]) -> None:
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()  # otherwise the next run of a sweep in this process would log into this one
