"""Run checks: what every run of a comparison or a sweep must have, so that methods differ and can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_words(words: Sequence[str]) -> None:
    """Raise ValueError if a word of the command names the runs, which is what their methods do."""
    if given := [word for word in words if word.startswith("label=")]:
        raise ValueError(f"{given[0]} would name every run alike; leave label= out: runs are named by their methods")


def check_runs(config: Mapping[str, Any]) -> None:
    """Raise ValueError if methods play no part in the runs, or if they leave nothing that is read afterwards."""
    trainer, loggers = config["trainer"], (config["logger"] or {}).values()
    strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    if not isinstance(strategy, Mapping):
        raise ValueError(
            f"trainer.strategy={strategy} has no pipeline, so that methods play no part; leave trainer=plain and "
            "trainer.strategy= out, or train one such run: pipeback train trainer=plain"
        )
    if not any(str((each or {}).get("_target_", "")).endswith("CSVLogger") for each in loggers):
        raise ValueError(
            "logger= has no CSVLogger, but curves are read from the metrics.csv that it writes; choose logger=csv, or "
            "logger=both, with W&B"
        )
