"""The search for a program that trains wrongly, by hypothesis, which shrinks what it finds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings

from .check import check
from .program import Program
from .strategies import programs


def search(number: int, count: int, shrink: bool = True, **where: Any) -> None:
    """Check `count` programs that the seed stands for; of those that fail, the smallest raises, with its command.

    shrink: False: it may be larger, and comes sooner. where: see `programs`.
    """

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(programs(**where))
    def run(program: Program) -> None:
        note(program.command)
        check(program)

    run()


def fresh(seconds: float, count: int = 100) -> Iterator[int]:
    """New seeds, for so long; each is printed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = secrets.randbelow(10**9)
        print(f"seed {number}, {count} programs", flush=True)
        yield number
