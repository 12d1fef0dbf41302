"""Which cases of a test run by default; the others are in the soak."""

import zlib
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

VARIED = {"case", "every", "kind", "method", "name", "optimizer", "options", "pair"}  # arguments that a law is run over
CLAIMS = {"message", "why"}  # with these, each case is a claim of its own
FEW = 3  # cases that are all run


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


def thin(items: Iterable[pytest.Item]) -> None:
    """Leave to the soak two of three cases of each test of a law over methods. One that is asked for alone is run."""
    tests = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("soak"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for test, cases in tests.items():
        arguments = set(cases[0].callspec.params)
        if arguments & VARIED and not arguments & CLAIMS:
            kept = usual(test, len(cases))
            for n, item in enumerate(cases):
                if n not in kept:
                    item.add_marker(pytest.mark.soak)


def usual(test: str, cases: int) -> range:
    """Return which of a test's cases are run by default: a third, but not fewer than two, or all of a few.

    Every test begins at a case of its own, so that a method meets other laws than its neighbours do.
    """
    apart = 1 if cases <= FEW else min(3, cases // 2)
    return range(zlib.crc32(test.encode()) % apart, cases, apart)
