"""What `vectorize="auto"` goes by: stages as one over the event loop, also for methods whose ticks are gone through
stage by stage, beside what was measured of F and B alone when the first micro-batch came.

as one     samples over the event loop's, with vectorize=True
F and B    how many times as fast these are as one, by `Pipeline.vectorized`
auto       samples over the event loop's, and what it chose
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from functools import partial

import torch

from pipeback.recipes.benches import vectorized
from pipeback.recipes.benches.network import create
from pipeback.recipes.benches.turns import interleaved
from pipeback.recipes.benches.vectorized import Case, pipeline, pushed

METHODS = ("pb", "pipemare", "gpipe", "one_f_one_b", "pipedream", "spectrain")
CASES = tuple(case for case in vectorized.CASES if case.name in ("20 x 64", "20 x 256", "12 blocks, d 64, T 16"))


def main(repeats: int, cases: Iterable[Case] = CASES) -> None:
    print(
        f"{'over the event loop':<36}{'as one':>8}{'   spread':>14}{'F and B':>12}{'auto':>8}{'   spread':>14}  chose"
    )
    for case in cases:
        x, y = torch.randn(2, case.turn * case.shape[0], *case.shape[1:])
        for name in METHODS:
            pipes = {
                on: pipeline(case, create(name, case.stages + 1), vectorize=on) for on in (False, True, "auto")
            }  # fmt: skip
            seconds = interleaved({str(on): partial(pushed, pipe, x, y) for on, pipe in pipes.items()}, repeats)
            ratios = {
                on: [a / b for a, b in zip(seconds["False"], seconds[on], strict=True)] for on in ("True", "auto")
            }
            told, chose = (next(iter(pipes[on].vectorized.values())) for on in (True, "auto"))
            gain = re.search(r"([\d.]+) times", told)
            print(f"{case.name + ': ' + name:<36}{spread(ratios['True'])}{gain[1] if gain else '':>12}"
                  f"{spread(ratios['auto'])}  {chose.partition(',')[0]}", flush=True)  # fmt: skip


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):>8.2f}{min(ratios):>7.2f} … {max(ratios):<4.2f}"
