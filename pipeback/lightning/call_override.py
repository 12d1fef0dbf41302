"""Call override: what a module does when it is called, or an optimizer when it steps, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def call_instead(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Meanwhile the module has this forward; None: that of its class. What it had before comes back."""
    own = module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.forward = own


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, before: Callable[[], object]) -> Iterator[None]:
    """Meanwhile a step of the optimizer is its closure, then `before`, then the step without a closure."""
    original, own = optimizer.step, optimizer.__dict__.get("step")

    def step(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        result = None if closure is None else closure()
        before()
        original(**more)
        return result

    step.__dict__.update(getattr(original, "__dict__", {}))  # what a scheduler has marked its wrapper with
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
