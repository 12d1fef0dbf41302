"""Callbacks of the recipes: they log samples and seconds, stop runs that diverge, and report progress."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class Measure(Callback):
    """Logs samples_seen and wall_time (seconds of training, without validation) beside every other number.

    It also has Lightning validate at the end of each epoch and of the training, whatever the interval: what is saved at
    validations is saved there, too.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._since: float | None = None
        self._interval: int | float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.samples += length(batch)
        self._log(pl_module, on_step=True)
        ends = trainer.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step
        if ends and self._interval is None and not trainer.should_stop:
            self._interval, trainer.val_check_batch = trainer.val_check_batch, 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, index: int) -> None:
        if self._interval is not None:
            trainer.val_check_batch, self._interval = self._interval, None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(pl_module, on_step=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.state.fn == "fit":
            self._since = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def _log(self, module: LightningModule, on_step: bool) -> None:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        module.log("samples_seen", float(self.samples), on_step=on_step, on_epoch=not on_step, batch_size=1)
        module.log("wall_time", self.seconds + running, on_step=on_step, on_epoch=not on_step, batch_size=1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()  # a run that goes on from here keeps the rows from before, also if this one is killed

    def state_dict(self) -> dict[str, Any]:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return {"samples": self.samples, "seconds": self.seconds + running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples, self.seconds = state_dict["samples"], state_dict["seconds"]


class StopWhenNotFinite(Callback):
    """Ends the run at the first loss that is not finite, and logs that loss."""

    stopped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopped = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        loss = loss_of(outputs)
        if loss is not None and not math.isfinite(loss):
            for logger in trainer.loggers:
                logger.log_metrics({"train/loss": loss}, step=trainer.global_step)
            trainer.should_stop = self.stopped = True

    def state_dict(self) -> dict[str, Any]:
        return {"stopped": True} if self.stopped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stopped = state_dict["stopped"]


class Lines(Callback):
    """Prints the measurements, one line per validation."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if (loss := loss_of(outputs)) is not None:
            self._losses.append(loss)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        found = {k: float(v) for k, v in trainer.callback_metrics.items()}
        held_out = "".join(f"   {written(k, v)}" for k, v in found.items() if k.startswith("val/"))
        training = f"   training loss {sum(self._losses) / len(self._losses):.3f}" if self._losses else ""
        print(f"{int(found.get('samples_seen', 0)):>8,} samples{training}{held_out}")
        self._losses = []


class ProgressFile(Callback):
    """Writes the progress of the run to a JSON file, for the progress bars of a comparison."""

    def __init__(self, file: Path, every: float = 0.3) -> None:
        self.file, self.every, self._next = file, every, 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if time.monotonic() >= self._next and trainer.is_global_zero:
            self._next = time.monotonic() + self.every
            batches = trainer.estimated_stepping_batches
            tell(self.file, state="running", done=trainer.global_step, of=batches, loss=loss_of(outputs))


def tell(file: Path, **values: Any) -> None:
    """Replace the file as a whole, so that a reader sees either the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values))
    os.replace(part, file)


def loss_of(outputs: Any) -> float | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) if isinstance(loss, Tensor) else None


def length(batch: Any) -> int:
    """Return the samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((n for n in map(length, parts) if n), 0)


def written(name: str, value: float) -> str:
    """val/accuracy 0.953 -> accuracy 95.3%"""
    kind = name.rpartition("/")[2]
    if kind == "accuracy":
        return f"{kind} {value:.1%}"
    return f"{'held-out loss' if kind == 'loss' else kind} {value:.{1 if kind == 'bleu' else 3}f}"
