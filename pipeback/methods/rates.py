"""Rates: an optimizer's rates are divided for the time of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeback.methods.base import OptimizerLike
from pipeback.methods.columns import Number


@contextmanager
def divided_rates(optimizer: OptimizerLike, divisor: Number) -> Iterator[None]:
    """A context in which the rates of all parameter groups are divided by `divisor`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate / divisor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
