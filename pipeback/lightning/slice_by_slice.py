"""Slice by slice: the slices of a batch go through `training_step` and through the stages one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.suspended_slices import Slice
from pipeback.pipeline.pipeline import Pipeline
from pipeback.private import run_backward


def run(
    cut: list[Slice],
    one: Callable[[Any], Any],
    backward: Callable[[], None],
    differentiate: Callable[[Tensor], None],
    log: micro_batches.Log,
    pipe: Pipeline | None,
) -> Any:
    """Run `training_step` on every slice, and B of all but the last, whose output is returned.

    one: `training_step` of a slice, and F. backward: B, after `differentiate` of the loss. pipe: None if the first
    slice is still to build it.
    """

    def step(part: Slice) -> Any:
        batch, log.samples = part
        output = one(batch)
        log.losses.append(step_checks.loss_of(output).detach())
        return output

    *others, last = cut
    with nullcontext() if pipe is None else pipe.one_push():
        for part in others:
            differentiate(step_checks.loss_of(step(part)))
            backward()
    return step(last)  # whose gradients hooks of the user may look at


def differentiate(loss: Tensor) -> None:
    """Do `loss.backward()`, for a plain loss without torch's checks in Python, which take as long as a small kernel."""
    if type(loss) is not Tensor or loss.dim() or not loss.requires_grad:
        loss.backward()
        return
    run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
