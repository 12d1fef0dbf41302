"""Stages that are alike and come from a store: run one by one, and as one, as many as half of `prefetch + 1`, by pushes
and under Lightning.

The weights stay on the device in the first row, with which all others are compared.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pipeback
from pipeback.recipes.benches import lightning_devices
from pipeback.recipes.benches.lightning_devices import Fit
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.under_lightning import ONES
from pipeback.recipes.benches.vectorized import CASES, Case, data, pipeline, pushed
from pipeback.recipes.markdown import table

Place = tuple[str, int]  # where weights come from, "host" or "disk", and how many stages ahead (`prefetch`)
PLACES: dict[str, tuple[Place, ...]] = {
    "host": (("host", 3), ("host", 7), ("host", 15)),
    "disk": (("host", 7), ("disk", 7)),
}
METHODS = ("pb", "cerebras")


def main(repeats: int, store: str = "host") -> None:
    if store not in PLACES:
        sys.exit(f"pipeback bench streamed_as_one: store={store!r} is unknown; there are {', '.join(PLACES)}")
    pushes(repeats, CASES[:3] if store == "host" else CASES[:3:2], PLACES[store])
    fits(repeats, lightning_devices.CASES, PLACES[store])


def fits(repeats: int, numbers: Iterable[int], places: Iterable[Place]) -> None:
    """Fits with `pb` of these networks under Lightning."""
    every = [Fit("resident"), Fit("resident, as one", vectorize=True)]
    for where, n in places:
        kind = {"ahead": n, "on_disk": where == "disk"}
        name = f"{where}, `prefetch={n}`"
        every += [Fit(name, **kind), Fit(f"{name}, as one", vectorize=True, **kind)]
    columns = []
    for number in numbers:
        turns = [[lightning_devices.seconds(number, fit) for fit in every] for _ in range(repeats)]
        first, *_ = some = list(zip(*turns, strict=True))
        columns.append([spread([a / b for a, b in zip(first, each, strict=True)]) for each in some])
    print("\nThe same under Lightning, with `pb` and batches of 64 micro-batches of one sample:\n")
    rows = [[fit.words, *cells] for fit, *cells in zip(every, *columns, strict=True)]
    print(table(["samples per second, of resident", *(ONES[number].words for number in numbers)], rows), flush=True)


def pushes(repeats: int, cases: Iterable[Case], places: Iterable[Place]) -> None:
    """Pushes, by method."""
    print("Stages that come from a store, over those whose weights stay, all in one thread:")
    for case in cases:
        with contenders(case, tuple(places)) as runs:
            seconds = interleaved(runs, repeats)
        rows = []
        for name, some in seconds.items():
            base = seconds[f"{name.split(',')[0]}, resident"]
            ratios = [a / b for a, b in zip(base, some, strict=True)]
            rows.append([name, f"{statistics.median(some) / case.turn * 1e3:.3f}", spread(ratios)])
        print("\n" + table([case.name, "ms/micro-batch", "of resident"], rows), flush=True)


@contextmanager
def contenders(case: Case, places: Iterable[Place]) -> Iterator[dict[str, Callable[[], Any]]]:
    """A turn of each; their pipelines are closed at the end of the context."""
    x, y = data(case)
    runs: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:

        def add(name: str, method: str, **options: Any) -> None:
            pipe = stack.enter_context(pipeline(case, method, **options))
            runs[f"`{method}`, {name}"] = partial(pushed, pipe, x, y)

        for method in METHODS:
            add("resident", method)
            for where, n in places:
                for words, on in (("", False), (", as one", True)):
                    folder = stack.enter_context(TemporaryDirectory())
                    kind = pipeback.HostStore if where == "host" else partial(pipeback.DiskStore, folder)
                    add(f"{where}, `prefetch={n}`{words}", method, store=kind(prefetch=n), vectorize=on)
        yield runs
