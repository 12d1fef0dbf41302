"""The search for a program that trains wrongly, by hypothesis, which shrinks what it finds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis.strategies import SearchStrategy

from .check import check
from .strategies import programs


def search(number: int, count: int, shrink: bool = True, **where: Any) -> None:
    """Check `count` programs that the seed stands for; of those that fail, the smallest raises, with its command.

    shrink: False: it may be larger, and comes sooner. where: see `programs`.
    """
    search_for(programs(**where), check, number, count, shrink)


def search_for(
    drawn: SearchStrategy[Any], check: Callable[[Any], None], number: int, count: int, shrink: bool = True
) -> None:
    """The same for what `drawn` draws, each with a `command` that replays it."""

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(drawn)
    def run(one: Any) -> None:
        note(one.command)
        check(one)

    run()


def fresh(seconds: float, count: int = 100, what: str = "programs") -> Iterator[int]:
    """New seeds, for so long; each is printed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = secrets.randbelow(10**9)
        print(f"seed {number}, {count} {what}", flush=True)
        yield number
