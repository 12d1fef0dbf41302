"""What Lightning and torchmetrics do not offer in public, in one place; a test fails when they change it.

* whether the loop goes forward only: `StochasticWeightAveraging` spends an epoch on the statistics of BatchNorm and
  sets `fit_loop._skip_backward` for it. Such forwards must run on the averaged weights, not through the pipeline.
* whether the optimizer steps after this batch, which depends on `accumulate_grad_batches` and on the end of an epoch.
* whether a checkpoint is made within an epoch, and the states of the training loaders that are read from one: Lightning
  hands them on within an epoch only, and where its last batch is done, so that nothing is left to train on.
* whether validation follows a batch, which a run that resumes from a checkpoint in between leaves out.
* what a torchmetrics metric gave for the last slice: `_forward_cache` is what Lightning logs on the step.
* the launchers, and `Strategy._configure_launcher`, which sets `_launcher`: each strategy of several processes has one.
* the steps at which a `ModelCheckpoint` looks at its metric, where it does so within an epoch; and whether validation
  is due by the clock, which is every rank's own.
* `_current_fx_name`, the hook of Lightning under which a LightningModule logs.
* `_trainer`, the attribute in which a LightningModule holds its Trainer: setting `trainer` sets that of its children.
* `_device_mesh`, which a LightningModule shows as `device_mesh`.
* `_compiler_ctx`, by which a LightningModule knows that `fit(torch.compile(module))` has compiled its steps.
* `_checkpoint_io`, what writes the checkpoints of a strategy, None if the user gave nothing (a Trainer refuses one that
  is set before its `plugins=` are); and `_WrappingCheckpointIO`, the base of those that wrap another.
* where a logger stands: a `CSVLogger` that does not know of the rows in its file deletes them.
* `_accelerator_connector`, which has the SLURM environment that says by which signal a job is told that it will end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.utilities.compile import to_uncompiled

__all__ = ["Launcher", "MultiProcessingLauncher", "ScriptLauncher"]
TRAINER = "_trainer"


def forward_only(trainer: Any) -> bool:
    return bool(trainer.fit_loop._skip_backward)


def steps_now(trainer: Any) -> bool:
    """Whether the optimizer steps after the batch that is being trained on."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def mid_epoch(trainer: Any) -> bool:
    """Whether a run that resumes from a checkpoint made now first finishes this epoch, or the validation after it."""
    return trainer.validating or not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def validates_next(trainer: Any) -> bool:
    """Whether validation follows the batch that is done; a run that resumes from a checkpoint of now leaves it out."""
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress.current
    if not trainer.training or fit._data_fetcher is None or batches.ready != batches.processed or not batches.ready:
        return False
    if fit.epoch_loop.val_loop._max_batches and fit.epoch_loop.val_loop.skip:  # Lightning leaves out an empty one, too
        return False
    return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))


def take_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Take the states of the training loaders that the loop has read from a checkpoint; it does not load them then."""
    states: list[dict[str, Any]] = trainer.fit_loop._combined_loader_states_to_load
    trainer.fit_loop._combined_loader_states_to_load = []
    return states


def running_hook(module: Any) -> str | None:
    """The hook under whose name a LightningModule logs now."""
    name: str | None = module._current_fx_name
    return name


def as_written(module: Any) -> Any:
    """Return a LightningModule without what `fit(torch.compile(module))` has compiled of it."""
    if module._compiler_ctx is None:
        return module
    to_uncompiled(module)
    for name in [name for name, mine in vars(module).items() if _is_of_class(module, name, mine)]:
        delattr(module, name)
    warnings.warn(
        f"torch.compile has compiled {type(module).__name__}. The stages train without it, since its graphs may keep "
        "functions of old weights; PipelineStrategy(compile=True) compiles each stage",
        stacklevel=2,
    )
    return module


def _is_of_class(module: Any, name: str, mine: Any) -> bool:
    """Whether an attribute of the module is the method that its class has anyway."""
    return getattr(mine, "__self__", None) is module and getattr(mine, "__func__", None) is getattr(
        type(module), name, mine
    )


def step_value(metric: Any) -> Any:
    return metric._forward_cache


def set_step_value(metric: Any, value: Any) -> None:
    metric._forward_cache = value


def looks(callback: Any, step: int) -> bool:
    """Whether a ModelCheckpoint may look at its metric at the end of the batch that has made this step."""
    if not isinstance(callback, ModelCheckpoint) or callback.monitor is None:
        return False
    every = callback._every_n_train_steps
    return callback._train_time_interval is not None or (every >= 1 and step % every == 0)


def show_mesh(module: Any, mesh: Any) -> None:
    """Show a LightningModule the mesh of its devices."""
    module._device_mesh = mesh


def written(logger: Any) -> dict[str, Any]:
    """Attributes by which a logger in another process goes on from what this one has written."""
    names = ("_version", "_experiment") if isinstance(logger, CSVLogger) else ("_version",)
    return {name: vars(logger)[name] for name in names if name in vars(logger)}


def default_checkpoint_io(strategy: Any, make: Callable[[], Any]) -> None:
    """Give a strategy what writes its checkpoints, if the user has not."""
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = make()
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = make()  # which it takes only if it wraps none


def set_checkpoint_io(strategy: Any, given: Any) -> None:
    strategy._checkpoint_io = given


def validates_by_the_clock(trainer: Any) -> bool:
    return trainer._val_check_time_interval is not None


def requeue_signal(trainer: Any) -> int | None:
    """The signal at which the Trainer saves a checkpoint and has SLURM queue the job again."""
    slurm = trainer._accelerator_connector.cluster_environment
    return slurm.requeue_signal if isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue else None
