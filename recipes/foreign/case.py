"""Case: a model, batches for it, and a loss. Nothing is downloaded, and nothing draws random numbers in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CLASSES = 10
WORDS, LENGTH = 96, 16


class Case(NamedTuple):
    """A model with its data. batch: a generator of random numbers -> (x, y), a micro-batch for `Pipeline.push`."""

    model: nn.Module
    batch: Callable[[torch.Generator], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    cuts: tuple[str, ...] = ("block", "layer")  # granularities that make sense


def called(model: nn.Module, x: Any) -> Any:
    """Call a model with the x of a push: a dictionary gives keyword arguments, a tuple positional ones."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def pictures(channels: int = 3, size: int = 32, samples: int = 2) -> Callable[[torch.Generator], tuple[Any, Any]]:
    """Return a function for batches of images (B, channels, size, size) with a class each."""
    return lambda generator: (
        torch.randn(samples, channels, size, size, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


def tokens(generator: torch.Generator) -> tuple[Any, Any]:
    """Return tokens (B, T) and the next ones; in about every second batch the second sentence ends in padding.

    Without padding, the forward takes another branch.
    """
    found = torch.randint(2, WORDS, (2, LENGTH + 1), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if torch.randint(2, (), generator=generator):
        mask[1, -4:] = 0
    return {"input_ids": found[:, :-1].contiguous(), "attention_mask": mask}, found[:, 1:].contiguous()


def steady(model: nn.Module) -> nn.Module:
    """Set dropout and stochastic depth to 0, since a plain loop has one random stream and a pipeline one per stage."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    return model
