"""Compares pushes of 256 micro-batches whose losses are read each time with one long push, and the shortest pushes of
stages that run as one with those of the event loop: one process, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.vectorized import Case, Linear, pipeline
from pipeback.recipes.markdown import table

SHORT, TIMES = 256, 8  # micro-batches of a push; pushes as long as the long one
CASES = (Case("48 x 64", Linear, 48, (1, 64), SHORT * TIMES), Case("20 x 64", Linear, 20, (1, 64), SHORT * TIMES))
SHORTEST, COUNT = (1, 2, 8), 96  # micro-batches of a push, and of all pushes of a turn
METHODS = ("pb", "cerebras")
ENDS: dict[str, dict[str, Any]] = {"as one": {"vectorize": True}, "event loop": {}}


def main(repeats: int, cases: Sequence[Case] = CASES, short: int = SHORT, shortest: Sequence[int] = SHORTEST) -> None:
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
    print("\nSamples per second of stages as one over those of the event loop.")
    for case in cases:
        few = case._replace(turn=min(COUNT, case.turn))
        rows = [[f"`{method}`", *over_the_loop(few, method, shortest, repeats)] for method in METHODS]
        print("\n" + table([case.name, *(f"pushes of {each}" for each in shortest)], rows), flush=True)


def over_the_loop(case: Case, method: str, lengths: Sequence[int], repeats: int) -> list[str]:
    """For pushes of these lengths, whose losses are read, the gain of running as one."""
    ends = list(ENDS)
    runs = {f"{each} {end}": pushes(case, method, each, ENDS[end]) for each in lengths for end in ends}
    seconds = interleaved(runs, repeats)
    pairs = [(seconds[f"{each} {ends[1]}"], seconds[f"{each} {ends[0]}"]) for each in lengths]
    return [spread([loop / one for loop, one in zip(*pair, strict=True)], ".1f") for pair in pairs]


def pushes(case: Case, method: str, each: int, options: dict[str, Any]) -> Any:
    """A function that pushes a turn in parts of `each` micro-batches and reads the loss of every part."""
    pipe = pipeline(case, method, **options)
    x, y = torch.randn(2, case.turn, *case.shape[1:])
    return partial(read, pipe, x.split(each), y.split(each))


def read(pipe: Any, xs: Iterable[Any], ys: Iterable[Any]) -> None:
    for x, y in zip(xs, ys, strict=True):
        float(pipe.push(x, y))
