"""Rank sync: all ranks of a fit use rank 0's metrics, its decision to stop and its random numbers.

They synchronise where Lightning decides something: at the end of an epoch, before and after validation, and at those
steps whose metrics a callback or a scheduler reads. In between every rank runs at its own pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from pipeback.lightning import lightning_internals
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.ranks.meeting import Meeting
from pipeback.tensors.checksum import checksum

OPTIONS = (
    "max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "limit_train_batches",
    "limit_val_batches", "overfit_batches", "reload_dataloaders_every_n_epochs", "num_sanity_val_steps",
)  # fmt: skip


def agree(
    meeting: Meeting,
    module: LightningModule,
    found: TrainedModule,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, Any],
) -> None:
    """Raise ValueError if an option differs between ranks; then give all ranks the weights of rank 0."""
    trainer: Any = module.trainer
    mine = {
        **facts,
        **{name: getattr(trainer, name) for name in OPTIONS},
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "optimizer": repr(optimizer),
        "stages": str(found.cuts) if found.split is None else len(found.stages),
        "leaves": found.leaves,
        "weights": [(name, tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items() if _known(t)],
    }
    every = meeting.gather("the options of fit", mine)
    for rank, theirs in enumerate(every):
        for key, value in every[0].items():
            if theirs[key] != value:
                has, here = _difference(theirs[key], value)
                raise ValueError(
                    f"rank {rank} has {key} {has}, rank 0 has {here}; start the same script with the same options on "
                    "every rank"
                )
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    if len(set(meeting.gather("the weights of fit", checksum(tensors, most=1 << 40)))) > 1:
        values = meeting.broadcast("rank 0's weights", [t.detach().cpu() for t in tensors])
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


def _difference(a: Any, b: Any) -> tuple[Any, Any]:
    """The first entries in which two lists of one length differ; otherwise both values whole."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return a, b


def _known(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.parameter.UninitializedParameter)


class RankSync(Callback):
    """The first of the Trainer's callbacks during a fit of several ranks.

    same_random_numbers: gives every rank the random state of rank 0.
    """

    def __init__(self, meeting: Meeting, same_random_numbers: Callable[[], None]) -> None:
        self.meeting, self.same_random_numbers = meeting, same_random_numbers
        self.stop = False  # asked for since the last meeting, on this rank
        self._finish: Callable[[], None] = lambda: None

    def begin(self, trainer: Trainer) -> None:
        """Run before all other callbacks and after all other hooks of a batch; stop metrics from summing over ranks."""
        module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, self)
        hook = module.on_train_batch_end

        def on_train_batch_end(outputs: Any, batch: Any, batch_idx: int) -> Any:
            result = hook(outputs, batch, batch_idx)
            self.after_batch(trainer, batch_idx)
            return result

        module.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
        metrics = [(m, m.distributed_available_fn) for m in module.modules() if isinstance(m, Metric)]
        for metric, _ in metrics:
            metric.distributed_available_fn = _alone

        def finish() -> None:
            callbacks.remove(self)
            del module.on_train_batch_end
            for metric, available in metrics:
                metric.distributed_available_fn = available

        self._finish = finish

    def finish(self) -> None:
        self._finish()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.same_random_numbers()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        step, schedulers = trainer.global_step, trainer.lr_scheduler_configs
        if any(lightning_internals.looks(callback, step) for callback in trainer.checkpoint_callbacks) or any(
            config.reduce_on_plateau and config.interval == "step" for config in schedulers
        ):
            self._share(trainer)

    def after_batch(self, trainer: Trainer, batch_idx: int) -> None:
        """Run after all hooks of a batch. A wish to stop waits for the next meeting, since other ranks are ahead."""
        self.stop |= trainer.should_stop
        trainer.should_stop = False
        if _validates_next(trainer, batch_idx):
            self.same_random_numbers()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._share(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.strategy.on_exception(exception)  # at once: what other callbacks do now, they do on this rank alone

    def _share(self, trainer: Trainer) -> None:
        metrics = {k: torch.as_tensor(v).detach().cpu() for k, v in trainer.callback_metrics.items()}
        wish = self.stop or trainer.should_stop
        found, stop = self.meeting.broadcast("the metrics of rank 0", (metrics, wish))
        if self.meeting.rank:
            device = trainer.strategy.root_device
            trainer.callback_metrics.update({k: v.to(device) for k, v in found.items()})
        trainer.should_stop, self.stop = stop, False


def _alone() -> bool:
    """Whether a metric is to be summed over ranks: never, since all of them see the same data."""
    return False


def _validates_next(trainer: Any, batch_idx: int) -> bool:
    """Whether validation may follow this batch; a needless yes does no harm."""
    every, total = trainer.val_check_batch, trainer.fit_loop.total_batch_idx
    if not trainer.enable_validation:
        return False
    by_number = every is not None and every != math.inf
    return trainer.is_last_batch or (by_number and 0 in ((batch_idx + 1) % every, (total + 1) % every))
