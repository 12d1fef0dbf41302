"""Reference batch: a rate and a momentum that were chosen for batches of one size, scaled to the samples of an update.

A pipeline may update after every micro-batch, where plain training updates once per batch. `scale_hyperparameters` has
the rule for momentum SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from pipeback.methods.base import Method
from pipeback.methods.momentum import scale_hyperparameters


def samples_per_update(method: Method | None, push: int | None, micro_batch: int | None) -> int | None:
    """The samples of an update, or None if they are not known.

    method: None for plain training. push, micro_batch: samples of a push (a batch), and of a micro-batch of it; None:
    not known, and the whole push.
    """
    if method is None or method.flush_each_push:
        return push
    if push is None and micro_batch is None:
        return None
    size = min(x for x in (push, micro_batch) if x is not None)
    return size * (getattr(method, "micro_batches", None) or 1)


def scaled(options: dict[str, Any], reference: int, samples: int) -> dict[str, Any]:
    """Rate and momentum of these options of an optimizer, chosen for `reference` samples per update, for `samples`."""
    rate, momentum = scale_hyperparameters(options["lr"], options["momentum"], reference, samples)
    return {"lr": rate, "momentum": momentum}


def check_scalable(optimizer: torch.optim.Optimizer, reference: int) -> None:
    """Raise ValueError if there is no rule for this optimizer."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"reference_batch={reference} scales rate and momentum by a rule for SGD, but the optimizer is "
            f"{type(optimizer).__name__}; leave reference_batch out, and give it a rate for the samples of an update"
        )


def scaling(
    factory: Callable[[Iterable[Any]], Any], reference: int, method: Method, micro_batch: int | None, replicas: int
) -> Callable[[Iterable[Any]], Any]:
    """Return a factory whose optimizers have scaled rates. Raises ValueError if the size of an update is not known."""
    samples = samples_per_update(method, None, micro_batch)
    if samples is None:
        give = (
            "and it is one push, of any size: leave reference_batch out, and give a rate for a push"
            if method.flush_each_push
            else f"which nothing says: give it, for example micro_batch_size={reference}"
        )
        raise ValueError(f"reference_batch={reference} scales rate and momentum to the samples of an update, {give}")

    @wraps(factory)
    def made(params: Iterable[Any]) -> Any:
        optimizer = factory(params)
        if isinstance(optimizer, torch.optim.Optimizer) and samples * replicas != reference:
            check_scalable(optimizer, reference)
            for group in optimizer.param_groups:
                group.update(scaled(group, reference, samples * replicas))
        return optimizer

    return made
