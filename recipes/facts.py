"""Facts: the facts of a run that are known before it starts, for hparams.yaml and the config of a W&B run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from pipeback.lightning import PipelineStrategy
from pipeback.methods.base import Method
from pipeback.recipes import build
from pipeback.recipes.provenance import provenance
from pipeback.schedules.ops import Schedule
from pipeback.schedules.timeline import bubble, timeline
from pipeback.splitting.split import Split

MOST = 2000  # the most micro-batches for which the bubble is measured on the schedule


def facts_of(
    config: Mapping[str, Any], trainer: Trainer, task: LightningModule, data: LightningDataModule, update_size: int,
    hyperparameters: Mapping[str, Any], split: Split | None,
) -> dict[str, Any]:  # fmt: skip
    """Return facts by flat names. delays: of each stage, in updates. bubble: the idle share of one worker per stage."""
    strategy, samples = trainer.strategy, build.epoch_samples(data, config["batch_size"])
    known = {
        "method": config["label"],
        "method_options": config["method"],
        "experiment": config["name"],
        "seed": config["seed"],
        "batch_size": config["batch_size"],
        "micro_batch_size": config["micro_batch_size"],
        "update_size": update_size,
        "optimizer": dict(hyperparameters),
        "metric": getattr(task, "metric", "val/loss"),
        "mode": getattr(task, "mode", "min"),
        "epoch_samples": samples,
        "epochs": config["epochs"],
        "classes": build.facts(data).get("classes"),
        "threads": config["threads"],
        **provenance(trainer.strategy.root_device),
    }
    if split is None or not isinstance(strategy, PipelineStrategy):
        return known | {"runtime": "plain Lightning", "method_options": {}, "micro_batch_size": None, "stages": 1,
                        "delays": [0], "slack2": False}  # fmt: skip
    method = build.method(strategy.options.method)
    stages = len(split.parts)
    method.check_stages(stages)
    delays = method.delays(stages)
    count = math.ceil(samples / (config["micro_batch_size"] or config["batch_size"]))
    return known | {
        "runtime": f"{strategy.ranks} processes" if strategy.several else "event loop",
        "stages": stages,
        "delays": delays,
        "slack2": delays[0] == 2 * (stages - 1),
        "bubble": idle(method, stages, min(count, MOST), config),
        "bubble_micro_batches": min(count, MOST),
    }


def idle(method: Method, stages: int, count: int, config: Mapping[str, Any]) -> float:
    per_batch = math.ceil(config["batch_size"] / (config["micro_batch_size"] or config["batch_size"]))
    flow = method.schedule_at(0, per_batch) if method.flush_each_push else method.schedule
    return _bubble(flow, stages, count)


@cache
def _bubble(flow: Schedule, stages: int, count: int) -> float:
    """The bubble of a schedule; many methods of a comparison have the same one."""
    return float(bubble(timeline(flow, stages, count)))
