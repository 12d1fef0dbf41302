"""What Lightning and torchmetrics do not offer in public, in one place; a test fails when they change it.

* whether the loop goes forward only: `StochasticWeightAveraging` spends an epoch on the statistics of BatchNorm and
  sets `fit_loop._skip_backward` for it. Such forwards must run on the averaged weights, not through the pipeline.
* whether a checkpoint is made within an epoch, and the states of the training loaders that are read from one: Lightning
  hands them on within an epoch only, and where its last batch is done, so that nothing is left to train on.
* what a torchmetrics metric gave for the last slice: `_forward_cache` is what Lightning logs on the step.
"""

from __future__ import annotations

from typing import Any


def forward_only(trainer: Any) -> bool:
    return trainer.fit_loop._skip_backward


def mid_epoch(trainer: Any) -> bool:
    """Whether a run that resumes from now on finishes this epoch first; at the validation after it, too."""
    return trainer.validating or not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def take_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Those of the training loaders, which the loop has read from a checkpoint; it will not load them itself."""
    states, trainer.fit_loop._combined_loader_states_to_load = trainer.fit_loop._combined_loader_states_to_load, []
    return states


def step_value(metric: Any) -> Any:
    return metric._forward_cache


def set_step_value(metric: Any, value: Any) -> None:
    metric._forward_cache = value
