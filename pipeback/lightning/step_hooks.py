"""The user's hooks that Lightning calls between the forward of a batch and its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pipeback.lightning.micro_batches import Log
from pipeback.lightning.slice_by_slice import differentiate
from pipeback.pipeline.pipeline import Pipeline

BACKWARD = ("backward", "on_before_backward")
LOOKS = ("on_after_backward", "on_before_optimizer_step")
GRADIENTS = ("on_before_optimizer_step", "configure_gradient_clipping")  # called with gradients that are complete


def overridden(trainer: Trainer, module: LightningModule, hooks: Sequence[str]) -> Iterator[str]:
    """Yield those of the hooks that the user has written, in the LightningModule or in a callback."""
    who: list[tuple[Any, type]] = [(module, LightningModule)]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    who += [(each, Callback) for each in callbacks if not type(each).__module__.startswith("lightning.")]
    for one, base in who:
        for hook in hooks:
            if hasattr(base, hook) and is_overridden(hook, one, base):
                yield f"{type(one).__name__}.{hook}"


class Piped(Protocol):
    """What has a pipeline, once it is built."""

    pipe: Pipeline | None


class StepHooks:
    """Has the user's hooks hear of the backward of every slice of a batch, of which Lightning knows the last alone, and
    see gradients that are means before a step.
    """

    def __init__(self, module: LightningModule, optimizer: torch.optim.Optimizer, elsewhere: str | None) -> None:
        """elsewhere: which weights have no gradients in hooks, and why; None: they have."""
        self.module, self.optimizer = module, optimizer
        self.differentiate: Callable[[Tensor], None] = differentiate  # the loss of a slice
        self._log: Log | None = None  # what the hooks have logged for the slices before
        self._any = next(overridden(module.trainer, module, BACKWARD), None) is not None
        if self._any:
            self.differentiate = self._differentiate
        self._look = next(overridden(module.trainer, module, GRADIENTS), None) is not None
        hook = None if elsewhere is None else next(overridden(module.trainer, module, LOOKS), None)
        if hook is not None:
            rank_zero_warn(f"{elsewhere}: {hook} neither sees their gradients nor changes them")

    def begin(self, log: Log) -> None:
        """Hear of a batch of several slices. log: collects what is logged on them."""
        self._log = log if self._any else None

    def last(self) -> AbstractContextManager[None]:
        """A context in which Lightning differentiates the loss of the last slice."""
        log, self._log = self._log, None
        return nullcontext() if log is None else log.last(self.module)

    def completed(self, closure: Callable[[], Any], fit: Piped) -> Callable[[], Any]:
        """Return the closure of a step of the optimizer, after which the gradients are means if hooks look at them."""
        if not self._look:
            return closure

        def averaged() -> Any:
            found = closure()
            if fit.pipe is not None:
                fit.pipe.average()
            return found

        return averaged

    def _differentiate(self, loss: Tensor) -> None:
        precision = self.module.trainer.strategy.precision_plugin
        precision.backward(precision.pre_backward(loss, self.module), self.module, self.optimizer)
