"""Stages that are alike and come from host memory: run one by one, and as one, as many as half of `prefetch + 1`.

The weights stay on the device in the first row, with which all others are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pipeback
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.vectorized import CASES, Case, data, pipeline, pushed
from pipeback.recipes.markdown import table

AHEAD = (3, 7, 15)  # values of `prefetch`
METHODS = ("pb", "cerebras")


def main(repeats: int, cases: Iterable[Case] = CASES[:3], ahead: Iterable[int] = AHEAD) -> None:
    print("\nStages that come from host memory, over those whose weights stay, all in one thread:")
    for case in cases:
        with contenders(case, tuple(ahead)) as runs:
            seconds = interleaved(runs, repeats)
        rows = []
        for name, some in seconds.items():
            base = seconds[f"{name.split(',')[0]}, resident"]
            ratios = [a / b for a, b in zip(base, some, strict=True)]
            rows.append([name, f"{statistics.median(some) / case.turn * 1e3:.3f}", spread(ratios)])
        print("\n" + table([case.name, "ms/micro-batch", "of resident"], rows), flush=True)


@contextmanager
def contenders(case: Case, ahead: tuple[int, ...]) -> Iterator[dict[str, Callable[[], Any]]]:
    """A turn of each; their pipelines are closed at the end of the context."""
    x, y = data(case)
    runs: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:

        def add(name: str, method: str, **options: Any) -> None:
            pipe = stack.enter_context(pipeline(case, method, **options))
            runs[f"`{method}`, {name}"] = partial(pushed, pipe, x, y)

        for method in METHODS:
            add("resident", method)
            for n in ahead:
                store = partial(pipeback.HostStore, prefetch=n)
                add(f"host, `prefetch={n}`", method, store=store())
                add(f"host, `prefetch={n}`, as one", method, store=store(), vectorize=True)
        yield runs
