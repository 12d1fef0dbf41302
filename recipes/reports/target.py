"""Target: the value for the time to target, from the user or a little short of the reference's final value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeback.recipes.reports.metric import mean_and_deviation
from pipeback.recipes.reports.runs import Method


def reference(methods: Sequence[Method]) -> Method | None:
    """Return the method that is the reference: sgd; without it the best synchronous method, or the best of all."""
    finished = sorted((m for m in methods if m.finals and not m.fate), key=_rank)
    synchronous = [m for m in finished if m.delay == 0]
    return next((m for m in finished if m.base == "sgd"), next(iter([*synchronous, *finished]), None))


def _rank(method: Method) -> float:
    return method.metric.ahead(mean_and_deviation(method.finals)[0])


class Target(NamedTuple):
    value: float
    why: str  # how it was chosen; "" if the user gave it


def target(methods: Sequence[Method], given: Any = None) -> Target | None:
    """Return the target: the user's, or 5 % short of the reference's final value; None without a reference."""
    metric = methods[0].metric
    if given is not None:
        return Target(metric.parse(given), "")
    if (base := reference(methods)) is None:
        return None
    return Target(
        metric.short_of(mean_and_deviation(base.finals)[0]), f"5 % short of what {base.label} reaches in the end"
    )
