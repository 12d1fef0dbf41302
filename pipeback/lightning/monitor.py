"""PipelineMonitor: staleness, updates and speed of the pipeline, stage by stage, in any logger."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pipeback.lightning.strategy import PipelineStrategy
from pipeback.watch import Watch


class PipelineMonitor(Callback):
    """Log, every so many steps, what the pipeline does:

    pipeback/delay/stage_S        own updates between F and B of a micro-batch that was followed
    pipeback/gap/stage_S          ‖w_now − w_used‖ of that micro-batch: w_used is what its F ran on
    pipeback/update_norm/stage_S  norm of one update
    pipeback/clip_share/stage_S   share of the updates since the last time whose gradient was clipped
    pipeback/throughput           samples a second since the last time, validation not counted
    pipeback/utilisation          share of that time spent in F, B and U
    pipeback/weight_copies        copies of the weights at the peak, pipeback/state_copies the method's own state
    pipeback/activation_mb        megabytes kept for backwards at the peak

    every_n_steps  None: as often as the Trainer logs. A copy of the weights is kept while a micro-batch is followed.

    With several devices it logs throughput alone: what happens within a stage is known where that stage is.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ValueError(f"every_n_steps must be a whole number of at least 1 or None, but is {every_n_steps!r}")
        self.every_n_steps = every_n_steps
        self._watch: Watch | None = None
        self._several = False
        self._samples = 0
        self._began = self._busy = self._paused = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise TypeError(
                f"PipelineMonitor watches the pipeback strategy, but this Trainer has "
                f"{type(trainer.strategy).__name__}; "
                'use Trainer(strategy="pipeback") or leave the callback out'
            )
        self._several = trainer.strategy.several

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = None
        self._mark(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        if self._several:
            return
        if self._watch is None and strategy.built:
            self._watch = strategy.pipeline.watch()
            self._watch.mark()
        if self._watch is not None:
            self._watch.follow()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += _samples(batch)
        every = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0) or 50
        if trainer.global_step == 0 or trainer.global_step % every or not trainer.is_global_zero:
            return
        if self._watch is None and not self._several:
            return
        for name, value in self._values(trainer).items():
            if not math.isnan(value):
                pl_module.log(f"pipeback/{name}", value, on_step=True, on_epoch=False, batch_size=1)
        if self._watch is not None:
            self._watch.mark()
        self._mark(trainer)

    def _values(self, trainer: Trainer) -> dict[str, float]:
        strategy, watch = trainer.strategy, self._watch
        seconds = time.perf_counter() - self._began - self._paused
        if watch is None:
            return {"throughput": self._samples / seconds}
        assert isinstance(strategy, PipelineStrategy)
        pipe = strategy.pipeline
        memory = pipe.memory()
        found = {
            "throughput": self._samples / seconds,
            "utilisation": (strategy.busy - self._busy) / seconds,
            "weight_copies": memory.copies,
            "state_copies": memory.state,
            "activation_mb": memory.activations / 1e6,
        }
        width = len(str(len(pipe.delays) - 1))
        kinds = {
            "delay": watch.delay, "gap": watch.gap, "update_norm": watch.update, "clip_share": watch.clip_share,
        }  # fmt: skip
        for kind, values in kinds.items():
            found.update({f"{kind}/stage_{s:0{max(width, 2)}}": float(value) for s, value in enumerate(values)})
        return found

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.perf_counter() - self._stopped

    def _mark(self, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, PipelineStrategy)
        self._samples, self._paused = 0, 0.0
        self._began, self._busy = time.perf_counter(), trainer.strategy.busy


def _samples(batch: Any) -> int:
    """Length of the first tensor in a batch."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
