"""Training under autocast to bfloat16, by pushes and under Lightning: a plain loop, and `pb` with stages one by one and
as one. What a processor gains by bfloat16 depends on whether it has such instructions; the ratios compare what computes
the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from pipeback.recipes.benches import lightning_devices
from pipeback.recipes.benches.lightning_devices import Fit
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.under_lightning import ONES
from pipeback.recipes.benches.vectorized import CASES, Case, data, model_and_step, pipeline, plain, pushed
from pipeback.recipes.markdown import table

FITS = (Fit("one by one", precision="bf16-mixed"), Fit('`"auto"`', vectorize="auto", precision="bf16-mixed"))
MIXED = "plain loop, autocast"


def main(repeats: int, cases: Iterable[Case] = (CASES[0], CASES[3], CASES[4])) -> None:
    pushes(repeats, cases)
    fits(repeats, lightning_devices.CASES)


def pushes(repeats: int, cases: Iterable[Case]) -> None:
    print("Pushes under autocast to bfloat16, in one thread: samples per second over those of the plain loop under it.")
    for case in cases:
        x, y = data(case)
        runs: dict[str, Callable[[], Any]] = {
            MIXED: under(partial(plain, *model_and_step(case), x, y, case.shape[0])),
            "plain loop, float32": partial(plain, *model_and_step(case), x, y, case.shape[0]),
            "`pb`, one by one, autocast": under(partial(pushed, pipeline(case, "pb"), x, y)),
            '`pb`, `"auto"`, autocast': under(partial(pushed, pipeline(case, "pb", vectorize="auto"), x, y)),
            '`pb`, `"auto"`, float32': partial(pushed, pipeline(case, "pb", vectorize="auto"), x, y),
        }
        seconds = interleaved(runs, repeats)
        rows = []
        for name, some in seconds.items():
            ratios = [a / b for a, b in zip(seconds[MIXED], some, strict=True)]
            rows.append([name, f"{statistics.median(some) / case.turn * 1e3:.3f}", spread(ratios)])
        print("\n" + table([case.name, "ms/micro-batch", "of the plain loop"], rows), flush=True)


def under(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return what runs under autocast."""

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            run()

    return cast


def fits(repeats: int, numbers: Iterable[int]) -> None:
    """Fits with `pb` and `precision="bf16-mixed"`."""
    cells = []
    for number in numbers:
        turns = [[lightning_devices.seconds(number, fit) for fit in FITS] for _ in range(repeats)]
        cells.append(spread([one / auto for one, auto in turns]))
    print('\nUnder Lightning, `precision="bf16-mixed"`, with `pb` and batches of 64 micro-batches of one sample:\n')
    names = [ONES[number].words for number in numbers]
    print(table(["samples per second", *names], [['`"auto"`, over stages one by one', *cells]]), flush=True)
