"""Trains one method and logs it: an ordinary Lightning program, composed from the groups of conf/.

    pipeback train experiment=digits method=cerebras
    pipeback train -m experiment=digits method=cerebras,pb,sgd seed=0,1     # hydra/launcher=joblib: side by side
    python recipes/train.py method=pb method.slack=1 epochs=5 model.depth=29 out=outputs/pb-1f1b
    pipeback train ckpt_path=outputs/train/digits/cerebras-seed0/checkpoints/last.ckpt epochs=5

A run is the folder `out`: config.yaml, hparams.yaml (the facts), metrics.csv, checkpoints/; `pipeback report <out>`
shows it.
"""

from __future__ import annotations

import logging
import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

import pipeback
from pipeback.counts import counted
from pipeback.lightning import PipelineMonitor, PipelineStrategy
from pipeback.lightning.checkpoint_file import CheckpointFile
from pipeback.recipes import build, full_disk
from pipeback.recipes.callbacks import Measure, StopWhenNotFinite, written
from pipeback.recipes.command import mistakes, start
from pipeback.recipes.facts import facts_of
from pipeback.recipes.first_call import split_of
from pipeback.recipes.folder_lock import locked
from pipeback.recipes.interrupts import ending
from pipeback.recipes.job_folders import folder_for_each
from pipeback.recipes.live import redraws
from pipeback.recipes.logs import begin, end
from pipeback.recipes.resident import resident
from pipeback.recipes.run_checks import check_interval
from pipeback.recipes.schemas import check
from pipeback.splitting.split import Split
from pipeback.tensors.meta import absent

# warnings that do not apply here: the data are in memory, and a folder is overwritten on purpose
QUIET = (
    "an update is of",  # the command says the update size, and rates are scaled by optimizer.reference
    "does not have many workers", "Checkpoint directory .* exists", "log directory .* exists", "Experiment logs dir",
    "LeafSpec", "set_vital", "smaller than the logging interval", "The number of training batches", "GPU available",
)  # fmt: skip

Record = dict[str, Any]


def run(config: Mapping[str, Any], more: Iterable[Callback] = (), say: Callable[[str], None] = print) -> Record:
    """Do one run, from its checked config to its files; return its `outcome`."""
    torch.set_num_threads(config["threads"])
    seed_everything(config["seed"], verbose=False)
    data = build.data(config["data"], config["batch_size"], config["seed"])
    trainer, measure = trainer_of(config, more)
    before = resident("VmRSS")
    task, size, hyperparameters, split = task_of(config, data, trainer)
    facts = facts_of(config, trainer, task, data, size, hyperparameters, split)

    out = Path(config["out"])
    with locked(out) if trainer.is_global_zero else nullcontext():
        if trainer.is_global_zero:
            (out / "config.yaml").write_text(as_yaml(config))
        begin(trainer.loggers, facts, config["ckpt_path"])
        say(
            f"{facts['method']}: {counted(facts['stages'], 'stage')}, D = {facts['delays'][0]} at stage 0, seed "
            f"{facts['seed']}"
        )
        say(f"update size {facts['update_size']}: {facts['optimizer']}")
        if isinstance(trainer.strategy, PipelineStrategy):
            trainer.strategy.tell = tell
        try:
            trainer.fit(task, datamodule=data, ckpt_path=config["ckpt_path"])
            found = outcome(trainer, task, data, measure)
        finally:
            end(trainer.loggers)
    if found["diverged"]:
        say(f"diverged after {counted(measure.samples, 'sample')}")
    else:
        told = [written(k, v) for k, v in found["measures"].items()]
        say("   ".join([*told, f"{found['samples_per_second']:,.0f} samples/s"]))
    most = resident("VmHWM")
    strategy = trainer.strategy
    streamed = isinstance(strategy, PipelineStrategy) and strategy.options.store is not None
    if before and most and streamed:
        say(f"resident memory: at most {most:,.0f} MB, {before:,.0f} MB of them before the model was built")
    return found


@rank_zero_only
def tell(plan: str) -> None:
    """Print the plan; a function of a module can be sent to other processes."""
    print(plan)


def trainer_of(config: Mapping[str, Any], more: Iterable[Callback] = ()) -> tuple[Trainer, Measure]:
    """Return the Trainer of its group, with the loggers and callbacks of theirs, and the callback `Measure`."""
    measure = Measure()
    callbacks: list[Callback] = [measure, *objects("callbacks", config), *more]
    if not redraws():
        callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]  # each line would stay
    loggers = objects("logger", config)
    if not isinstance(config["trainer"].get("strategy"), Mapping):
        callbacks = [c for c in callbacks if not isinstance(c, PipelineMonitor)]  # there is no pipeline to monitor
    if not loggers:
        callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]  # there is no logger
    shown = {
        "enable_progress_bar": any(isinstance(c, ProgressBar) for c in callbacks),
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        "enable_model_summary": any(isinstance(c, ModelSummary) for c in callbacks),
    }
    options = {"callbacks": callbacks, "logger": loggers or False}
    given = OmegaConf.create(dict(config["trainer"]))
    trainer = instantiate(given, **options, **{k: v for k, v in shown.items() if k not in given})
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # Lightning's own choice, of a plain run
        trainer.strategy.checkpoint_io = CheckpointFile()
    return trainer, measure


def objects(group: str, config: Mapping[str, Any]) -> list[Any]:
    """Make the objects of a group of Lightning objects, in the order of its entries."""
    try:
        return [instantiate(OmegaConf.create(each)) for each in (config[group] or {}).values() if each]
    except ModuleNotFoundError as error:
        raise ValueError(f"{group} needs {error.name}: pip install 'pipeback[wandb]'") from error


def task_of(
    config: Mapping[str, Any], data: LightningDataModule, trainer: Trainer
) -> tuple[LightningModule, int, Record, Split | None]:
    """Return the LightningModule, the update size, the optimizer's options and the stages, None without a pipeline.

    Errors of all of them are raised here.
    """
    pipeline = trainer.strategy if isinstance(trainer.strategy, PipelineStrategy) else None
    method = build.method(pipeline.options.method) if pipeline else None
    step = config["batch_size"] * trainer.accumulate_grad_batches
    size = build.update_size(method, step, config["micro_batch_size"])
    optimizer, hyperparameters = build.optimizer(config["optimizer"], size)
    configured = build.scheduled(optimizer, config["optimizer"], batches_of(trainer, data, config["batch_size"]))
    task = build.task(config["task"], build.model(config["model"], build.facts(data), config["seed"]), configured)
    split = split_of(task, trainer, data)
    if pipeline and method and split and not pipeline.several and not absent(task):
        pipeback.Pipeline(split, loss=None, optimizer=optimizer, method=method)  # for its checks; fit builds its own
    return task, size, hyperparameters, split


def batches_of(trainer: Trainer, data: LightningDataModule, batch_size: int) -> Callable[[], float]:
    """Return a function that returns the number of optimizer steps of a training.

    `trainer.estimated_stepping_batches` sets up the loader before the state of the loader is there that a checkpoint
    has, and Lightning then never loads it: a run that resumes within an epoch would begin that epoch anew.
    """
    if not isinstance(trainer.strategy, PipelineStrategy) and trainer.world_size > 1:  # each process has a part
        return partial(getattr, trainer, "estimated_stepping_batches")
    loaded, limit = math.ceil(build.epoch_samples(data, batch_size) / batch_size), trainer.limit_train_batches
    loaded = min(loaded, limit) if isinstance(limit, int) else int(loaded * (1.0 if limit is None else limit))
    check_interval(trainer, loaded)
    total = math.ceil(loaded / trainer.accumulate_grad_batches) * max(trainer.max_epochs or 1, 1)
    return partial(float, total if trainer.max_steps == -1 else min(total, trainer.max_steps))


def outcome(trainer: Trainer, task: LightningModule, data: LightningDataModule, measure: Measure) -> Record:
    """Return whether the run diverged; if not, also the measures of the drained model, which are logged once more.

    For a model that memory may not hold, they are those of the last validation.
    """
    if any(isinstance(c, StopWhenNotFinite) and c.stopped for c in trainer.callbacks):  # type: ignore[attr-defined]
        return {"diverged": True, "measures": {}}
    if absent(task):  # the weights are in files
        last = {k: float(v) for k, v in trainer.callback_metrics.items()}
    else:
        found = trainer.validate(task, datamodule=data, verbose=False)  # [] if there are no validation data
        last = {k: v for each in found for k, v in each.items()}
    measures = {k: v for k, v in last.items() if k.startswith("val/")}
    return {
        "diverged": not all(map(math.isfinite, measures.values())),
        "measures": measures,
        "samples_per_second": measure.samples / measure.seconds if measure.seconds else 0.0,
    }


def as_yaml(config: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({k: v for k, v in config.items() if k != "methods"}))


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in QUIET:
        warnings.filterwarnings("ignore", f".*{text}")


def job(config: DictConfig) -> None:
    """Do one run, alone or of a sweep. A mistake ends it with one line."""
    with mistakes("train"):
        values = check(config)
        if any(word.startswith("methods=") for word in HydraConfig.get().overrides.task):
            raise ValueError("methods is an option of `pipeback compare`; a sweep is -m method=pb,sgd")
        if values["ckpt_path"] is not None and not Path(values["ckpt_path"]).is_file():
            raise ValueError(f"ckpt_path={values['ckpt_path']}: there is no such file")
        quiet()
        say = rank_zero_only(Console(highlight=False, soft_wrap=True).print)
        try:
            with ending(partial(stopped, Path(values["out"]), time.time())), full_disk.writing(values["out"]):
                run(values, say=say)
        except MisconfigurationException as error:  # Lightning's error for a mistake of the user
            raise ValueError(str(error)) from error
        shown = f"; `pipeback report {shlex.quote(values['out'])}` shows it" if values["logger"] else ""
        say(f"written to {values['out']}{shown}")


def stopped(out: Path, since: float) -> str:
    """Say how a run that Ctrl-C has ended goes on. since: when it began; older checkpoints are of another run."""
    last = out / "checkpoints" / "last.ckpt"
    if not last.is_file() or last.stat().st_mtime < since:
        return "pipeback train: stopped before the first checkpoint"
    told = shlex.quote(f"ckpt_path={last}")
    return f"pipeback train: stopped. The same command with {told} goes on"


def main() -> None:
    with mistakes("train"):
        sys.argv[1:] = folder_for_each(sys.argv[1:])
    start("train", job)


if __name__ == "__main__":
    from pipeback.recipes import train  # not __main__, since other processes import the functions that are sent to them

    train.main()
