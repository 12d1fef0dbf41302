"""The user's optimizer while stages have their own: its steps, and the clipping that the Trainer asks for.

The user's optimizer steps, too, while no parameter has a gradient. This changes no weight, but hooks, profilers and
schedulers see the step that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, before: Callable[[], object]) -> Iterator[None]:
    """Within this context a step of the optimizer runs its closure, then `before`, then the step without a closure."""
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


def norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """The largest norm of a stage's gradient and the largest absolute value of an entry; None: no limit."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)
