"""Which cases of a test run by default; the others are in the soak."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def rare(*values: Any, id: str | None = None) -> Any:
    """A case of the soak."""
    return pytest.param(*values, marks=pytest.mark.soak, id=id)


def mostly_rare(values: Iterable[Any], *usual: Any) -> list[Any]:
    """All of them, in the soak but for the usual ones; a plain tuple has the values of several arguments."""
    every = list(values)
    assert all(value in every for value in usual), "a usual case that is not there"
    return [value if value in usual else rare(*(value if type(value) is tuple else (value,))) for value in every]


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, in the soak but for as few cases as the longest axis has, which have every value."""
    values = [list(axis) for axis in axes]
    usual = {tuple(n % len(axis) for axis in values) for n in range(max(map(len, values)))}
    places = product(*(range(len(axis)) for axis in values))
    return [
        (pytest.param if place in usual else rare)(*(axis[n] for axis, n in zip(values, place, strict=True)))
        for place in places
    ]
