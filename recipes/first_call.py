"""First call: how `training_step` calls the model first, from which the stages of a model are cut that is traced.

`fit` cuts them at its first batch; the checks and facts of a run need them before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from pipeback.lightning import PipelineStrategy, micro_batches, step_checks
from pipeback.lightning.find_stages import TrainedModule, find
from pipeback.lightning.followed_step import Given
from pipeback.splitting.split import Split


class _Called(BaseException):
    """Ends a `training_step` where it calls the model. `except Exception` does not catch it."""


def split_of(task: LightningModule, trainer: Trainer, data: LightningDataModule) -> Split | None:
    """Return how `fit` will cut the model into stages; None without a pipeline. Neither model nor data change."""
    if not isinstance(trainer.strategy, PipelineStrategy):
        return None
    options = trainer.strategy.options
    found = find(task, options.module, options.splitting)
    if found.split is not None:
        return found.split
    with _first_batch(data) as batch, _attached(task, trainer):
        size = options.micro_batch_size
        part = batch if size is None else micro_batches.cut(batch, size)[0][0]
        return found.cut(found.module, _input_of(found, task, part))


@contextmanager
def _first_batch(data: LightningDataModule) -> Iterator[Any]:
    """Within this context no random numbers are taken from those of the run, nor samples from its order."""
    with isolate_rng(include_cuda=False):
        kept = data.state_dict()
        batch = next(iter(data.train_dataloader()))
        if kept:
            data.load_state_dict(kept)
        yield batch


@contextmanager
def _attached(task: LightningModule, trainer: Trainer) -> Iterator[None]:
    """Within this context `training_step` may read its Trainer."""
    task.trainer = trainer
    try:
        yield
    finally:
        task.trainer = None


def _input_of(found: TrainedModule, task: LightningModule, batch: Any) -> Any:
    """What the pipeline is given where `training_step` calls the model with this batch."""
    rest = (0,) if len(signature(task.training_step).parameters) > 1 else ()
    given, seen = Given(task.training_step, batch, rest, {}), list[Any]()

    def forward(*inputs: Any, **named: Any) -> Any:
        step_checks.check_call(found, inputs, named, again=False)
        seen.append(found.given(inputs, named))
        raise _Called

    try:
        with found.heard(given, forward, lambda: None):
            output = given.run()
    except _Called:
        return seen[0]
    step_checks.check_output(found, output, None)
    raise AssertionError
