"""Compares the gain of running stages as one with the gain that `vectorize="auto"` measures to decide.

Methods whose ticks are interpreted stage by stage are included. F is the forward of a stage, B its backward. The gain
of F and B alone is measured when the first micro-batch comes.

as one     samples per second with vectorize=True, over those of the event loop
F and B    by how many times running as one makes these faster, as `Pipeline.vectorized` measures it
auto       samples per second with vectorize="auto" over those of the event loop, and what it chose
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from pipeback.recipes.benches import vectorized
from pipeback.recipes.benches.network import create
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.vectorized import Case, data, pipeline, pushed
from pipeback.recipes.markdown import table

METHODS = ("pb", "pipemare", "gpipe", "one_f_one_b", "pipedream", "spectrain")
CASES = tuple(case for case in vectorized.CASES if case.name in ("20 x 64", "20 x 256", "12 blocks, d 64, T 16"))


def main(repeats: int, cases: Iterable[Case] = CASES) -> None:
    for case in cases:
        rows = []
        x, y = data(case)
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
            rows.append([f"`{name}`", spread(ratios["True"]), gain[1] if gain else "", spread(ratios["auto"]),
                         re.split("[,:]", chose)[0]])  # fmt: skip
        head = [f"{case.name}, over the event loop", "as one", "F and B", "auto", "it chose"]
        print("\n" + table(head, rows, left=(0, 4)), flush=True)
