"""Rates: an optimizer's rates are divided for the time of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeback.methods.base import OptimizerLike, Weights
from pipeback.methods.columns import Number
from pipeback.tensors.weight_list import chosen


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


@contextmanager
def each_divided(optimizer: OptimizerLike, weights: Weights, divisors: Sequence[float]) -> Iterator[None]:
    """A context in which the rate of every weight is divided by its own divisor."""
    if all(divisor == divisors[0] for divisor in divisors):
        with divided_rates(optimizer, divisors[0]):
            yield
        return
    groups, own = optimizer.param_groups, list(optimizer.param_groups)
    if len(own) == 1 and own[0]["params"] is weights:
        groups[:] = _parts(own[0], divisors)
    else:
        of = dict(zip(map(id, weights), divisors, strict=True))
        groups[:] = [part for group in own for part in _parts(group, [of[id(w)] for w in group["params"]])]
    try:
        yield
    finally:
        groups[:] = own


def _parts(group: dict[str, Any], divisors: Sequence[float]) -> list[dict[str, Any]]:
    """A group as groups of one rate each; as it is, with a rate per weight, if its step can do that ("rates")."""
    if "rates" in group:
        rate = float(group["lr"])
        return [{**group, "rates": tuple([rate / divisor for divisor in divisors])}]
    found = []
    for divisor in dict.fromkeys(divisors):
        some = [n for n, other in enumerate(divisors) if other == divisor]
        found.append({**group, "params": chosen(group["params"], some), "lr": group["lr"] / divisor})
    return found
