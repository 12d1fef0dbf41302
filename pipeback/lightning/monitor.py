"""PipelineMonitor logs the staleness, updates and speed of the pipeline per stage, in any logger."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pipeback.lightning.strategy import PipelineStrategy
from pipeback.pipeline.memory_use import Memory
from pipeback.runtime.staleness import Watch
from pipeback.streaming.traffic import Traffic
from pipeback.tensors import batches


class PipelineMonitor(Callback):
    """Log, every `every_n_steps` steps, what the pipeline does. F, B and U are forward, backward and update of a stage.

    pipeback/delay/stage_S        updates of the stage between F and B of one micro-batch that was observed
    pipeback/gap/stage_S          ‖w_now − w_used‖ of that micro-batch: w_used is what its F ran on
    pipeback/update_norm/stage_S  norm of one update
    pipeback/clip_share/stage_S   share of the updates since the last log whose gradient was clipped
    pipeback/throughput           samples per second since the last log, without the time of validation
    pipeback/utilisation          share of that time spent in F, B and U
    pipeback/weight_copies        copies of the weights at the peak, pipeback/state_copies the method's own state
    pipeback/activation_mb        megabytes kept for B at the peak

    With a store it also logs:

    pipeback/streamed_mb          megabytes of weights and gradients copied to and from the device since the last log
    pipeback/stall_share          share of the time of F, B and U in which they waited for the store
    pipeback/peak_stages          largest number of stages on the device at once

    every_n_steps  None: as often as the Trainer logs
    follow         False: without delays and gaps, for which a copy of the weights is kept in memory

    With several devices every rank observes micro-batches in its own stages, and the ranks exchange what they log.
    There is no utilisation then, and memory is summed over the ranks.
    """

    def __init__(self, every_n_steps: int | None = None, follow: bool = True) -> None:
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ValueError(f"every_n_steps must be a whole number of at least 1 or None, but is {every_n_steps!r}")
        self.every_n_steps, self.follow = every_n_steps, follow
        self._watch: Watch | None = None
        self._traffic = Traffic()  # when last logged
        self._samples = 0
        self._to_follow = False  # whether a micro-batch is to be followed until the next log
        self._began = self._busy = self._paused = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise TypeError(
                f"PipelineMonitor watches the pipeback strategy, but this Trainer has "
                f"{type(trainer.strategy).__name__}; "
                'use Trainer(strategy="pipeback") or leave the callback out'
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch, self._traffic = None, Traffic()
        self._mark(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        if self._watch is None and strategy.built:
            self._watch = strategy.pipeline.watch()
            self._watch.mark()
        if self._watch is not None and self._to_follow:
            self._watch.follow()  # one per log: while a micro-batch is followed, stages run as one more slowly
            self._to_follow = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += _samples(batch)
        every = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0) or 50
        if self._watch is None or trainer.global_step == 0 or trainer.global_step % every:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        seconds = time.perf_counter() - self._began - self._paused
        busy = strategy.busy - self._busy
        before, self._traffic = self._traffic, strategy.pipeline.traffic()
        mine = strategy.pipeline.memory(), _stages(self._watch), self._traffic.since(before)
        everybody = [mine] if strategy.meeting is None else strategy.meeting.gather("PipelineMonitor", mine, 0)
        if everybody:
            found = {"throughput": self._samples / seconds, **_merged(everybody)}
            if len(everybody) == 1:
                found["utilisation"] = busy / seconds
            for name, value in found.items():
                pl_module.log(f"pipeback/{name}", value, on_step=True, on_epoch=False, batch_size=1)
        self._watch.mark()
        self._mark(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.perf_counter() - self._stopped

    def _mark(self, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, PipelineStrategy)
        self._samples, self._paused, self._to_follow = 0, 0.0, self.follow
        self._began, self._busy = time.perf_counter(), trainer.strategy.busy


def _stages(watch: Watch) -> dict[str, float]:
    """Return the measurements of every stage, by name."""
    width = max(2, len(str(len(watch.delay) - 1)))
    kinds = {"delay": watch.delay, "gap": watch.gap, "update_norm": watch.update, "clip_share": watch.clip_share}
    return {
        f"{kind}/stage_{s:0{width}}": float(value)
        for kind, values in kinds.items()
        for s, value in enumerate(values)
        if not math.isnan(value)
    }


def _merged(ranks: Sequence[tuple[Memory, dict[str, float], Traffic]]) -> dict[str, float]:
    memories = [memory for memory, _, _ in ranks]
    weights = sum(memory.weights for memory in memories)
    found = {
        "weight_copies": sum(memory.copies * memory.weights for memory in memories) / weights,
        "state_copies": sum(memory.state * memory.weights for memory in memories) / weights,
        "activation_mb": sum(memory.activations for memory in memories) / 1e6,
    }
    for _, stages, _ in reversed(ranks):  # the last rank holds the first stages
        found.update(stages)
    traffic = [each for *_, each in ranks]
    if any(each.peak_stages for each in traffic):
        moved = sum(each.weights_in + each.gradients_out + each.sums_in for each in traffic)
        seconds = sum(each.seconds for each in traffic)
        found["streamed_mb"] = moved / 1e6
        found["stall_share"] = sum(each.stall for each in traffic) / seconds if seconds else 0.0
        found["peak_stages"] = max(each.peak_stages for each in traffic)
    return found


def _samples(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor."""
    return next(iter(batches.samples(batch)), 1)
