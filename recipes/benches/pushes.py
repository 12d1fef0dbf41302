"""Compares pushes of 256 micro-batches whose losses are read each time with one long push: one process, one thread."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.vectorized import Case, Linear, pipeline
from pipeback.recipes.markdown import table

SHORT, TIMES = 256, 8  # micro-batches of a push; pushes as long as the long one
CASES = (Case("48 x 64", Linear, 48, (1, 64), SHORT * TIMES), Case("20 x 64", Linear, 20, (1, 64), SHORT * TIMES))
METHODS = ("pb", "cerebras")
ENDS: dict[str, dict[str, Any]] = {"as one": {"vectorize": True}, "event loop": {}}


def main(repeats: int, cases: Iterable[Case] = CASES, short: int = SHORT) -> None:
    print("Samples per second over those of one long push whose loss is read at its end; micro-batch 1.")
    for case in cases:
        rows = []
        for end, options in ENDS.items():
            for method in METHODS:
                runs = {str(each): pushes(case, method, each, options) for each in (case.turn, short)}
                seconds = interleaved(runs, repeats)
                ratios = [a / b for a, b in zip(seconds[str(case.turn)], seconds[str(short)], strict=True)]
                rows.append([f"`{method}`, {end}", f"{len(range(0, case.turn, short))} × {short}", spread(ratios)])
        head = [case.name, "pushes, each loss read", f"of one of {case.turn:,}"]
        print("\n" + table(head, rows, left=(0, 1)), flush=True)


def pushes(case: Case, method: str, each: int, options: dict[str, Any]) -> Any:
    """A function that pushes a turn in parts of `each` micro-batches and reads the loss of every part."""
    pipe = pipeline(case, method, **options)
    x, y = torch.randn(2, case.turn, *case.shape[1:])
    return partial(read, pipe, x.split(each), y.split(each))


def read(pipe: Any, xs: Iterable[Any], ys: Iterable[Any]) -> None:
    for x, y in zip(xs, ys, strict=True):
        float(pipe.push(x, y))
