"""Run checks: what every run of a comparison or a sweep must have, so that methods differ and can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from pipeback.counts import counted


def check_words(words: Sequence[str]) -> None:
    """Raise ValueError if a word of the command names the runs, which is what their methods do."""
    if given := [word for word in words if word.startswith("label=")]:
        raise ValueError(f"{given[0]} would name every run alike; leave label= out: runs are named by their methods")


def check_runs(config: Mapping[str, Any], offline: bool = False) -> None:
    """Raise ValueError if methods play no part in the runs, or if they leave nothing that is read afterwards.

    offline: whether runs of W&B that are offline are read, too.
    """
    trainer, loggers = config["trainer"], (config["logger"] or {}).values()
    strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    if not isinstance(strategy, Mapping):
        raise ValueError(
            f"trainer.strategy={strategy} has no pipeline, so that methods play no part; leave trainer=plain and "
            "trainer.strategy= out, or train one such run: pipeback train trainer=plain"
        )
    if not any(_read(each or {}, offline) for each in loggers):
        raise ValueError(
            "logger= leaves no file that is read afterwards, as metrics.csv is, which a CSVLogger writes; choose "
            "logger=csv, or logger=both, with W&B"
        )


def check_interval(trainer: Trainer, batches: int) -> None:
    """Raise ValueError if an epoch has fewer batches than a validation is to follow, which Lightning does not take."""
    every = trainer.val_check_interval
    if isinstance(every, int) and trainer.check_val_every_n_epoch is not None and 0 < batches < every:
        raise ValueError(
            f"validate_every={every} (trainer.val_check_interval) is more than the {counted(batches, 'batch')} of an "
            f"epoch; give validate_every={batches} or less, or a fraction of an epoch, as validate_every=1.0"
        )


def unlogged(batches: float, every: int) -> str:
    """What to say of runs that log no training loss, since they have fewer batches than it is logged after; or ''."""
    if every and batches >= every:
        return ""
    return (
        f"runs of {counted(int(batches), 'batch')} log no training loss at "
        f"trainer.log_every_n_steps={every}, so that they have no best rate and no slow-down; give "
        "trainer.log_every_n_steps=1"
    )


def _read(logger: Mapping[str, Any], offline: bool) -> bool:
    kind = str(logger.get("_target_", "")).rpartition(".")[2]
    return kind == "CSVLogger" or (offline and kind == "WandbLogger" and bool(logger.get("offline")))
