"""Compares pushes of 256 micro-batches whose losses are read each time with one long push, and the shortest pushes of
stages that run as one with those of the event loop: one process, one thread. Then other optimizers, gradients that are
clipped, and other methods with vectorize="auto", which must not be slower than the event loop where it gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import pipeback
from pipeback import methods
from pipeback.recipes.benches.turns import interleaved, spread
from pipeback.recipes.benches.vectorized import Case, Linear, pipeline
from pipeback.recipes.markdown import table

Chosen = str | pipeback.Method
SHORT, TIMES = 256, 8  # micro-batches of a push; pushes as long as the long one
CASES = (Case("48 x 64", Linear, 48, (1, 64), SHORT * TIMES), Case("20 x 64", Linear, 20, (1, 64), SHORT * TIMES))
SHORTEST, COUNT = (1, 2, 8), 96  # micro-batches of a push, and of all pushes of a turn
METHODS = ("pb", "cerebras")
ENDS: dict[str, dict[str, Any]] = {"as one": {"vectorize": True}, "event loop": {}}
ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
USUAL = "momentum SGD"
OTHERS: dict[str, dict[str, Any]] = {
    USUAL: {"optimizer": SGD},
    "momentum SGD, `clip_norm=1.0`": {"optimizer": SGD, "clip_norm": 1.0},
    "Nesterov": {"optimizer": partial(SGD, nesterov=True)},
    "fused SGD": {"optimizer": partial(SGD, fused=True)},
    "AdamW": {"optimizer": ADAMW},
    "AdamW, `clip_norm=1.0`": {"optimizer": ADAMW, "clip_norm": 1.0},
    "fused AdamW": {"optimizer": partial(ADAMW, fused=True)},
    "RMSprop": {"optimizer": partial(torch.optim.RMSprop, lr=1e-4)},
    "NAdam": {"optimizer": partial(torch.optim.NAdam, lr=1e-4)},
}
ROUNDS = 4  # micro-batches of an update
OTHER_METHODS: dict[str, Callable[[int], pipeback.Method]] = {  # by the number of stages
    "`pipedream`": lambda stages: methods.create("pipedream"),
    "`pipedream`, vertical sync": lambda stages: methods.create("pipedream", vertical_sync=True),
    f"`pipemare`, {ROUNDS} per update": lambda stages: methods.create("pipemare", micro_batches=ROUNDS, anneal=1000),
    "`pipedream_2bw`, S per update": lambda stages: methods.create("pipedream_2bw", micro_batches=stages),
}
LENGTHS = (1, 8, 96)  # micro-batches of a push


def main(
    repeats: int, cases: Sequence[Case] = CASES, short: int = SHORT, shortest: Sequence[int] = SHORTEST,
    lengths: Sequence[int] = LENGTHS,
) -> None:  # fmt: skip
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
        rows = [[f"`{method}`", *over_the_loop(few, method, shortest, repeats, ENDS)] for method in METHODS]
        print("\n" + table([case.name, *(f"pushes of {each}" for each in shortest)], rows), flush=True)
    print('\nSamples per second with vectorize="auto" over those of the event loop.')
    for case in cases[-1:]:
        few, rows = case._replace(turn=min(COUNT, case.turn)), []
        some: dict[str, tuple[Chosen, Any]] = {f"`pb`, {name}": ("pb", how) for name, how in OTHERS.items()}
        some |= {name: (create(case.stages + 1), OTHERS[USUAL]) for name, create in OTHER_METHODS.items()}
        for name, (which, options) in some.items():
            ends = {"auto": {**options, "vectorize": "auto"}, "event loop": options}
            rows.append([name, *over_the_loop(few, which, lengths, repeats, ends)])
        print("\n" + table([case.name, *(f"pushes of {each}" for each in lengths)], rows), flush=True)


def over_the_loop(
    case: Case, method: Chosen, lengths: Sequence[int], repeats: int, ends: Mapping[str, dict[str, Any]]
) -> list[str]:
    """For pushes of these lengths, whose losses are read, the gain of the first of two ways of running them."""
    first, other = ends
    runs = {f"{each} {end}": pushes(case, method, each, options) for each in lengths for end, options in ends.items()}
    seconds = interleaved(runs, repeats)
    pairs = [(seconds[f"{each} {other}"], seconds[f"{each} {first}"]) for each in lengths]
    return [spread([loop / one for loop, one in zip(*pair, strict=True)], ".1f") for pair in pairs]


def pushes(case: Case, method: Chosen, each: int, options: dict[str, Any]) -> Any:
    """A function that pushes a turn in parts of `each` micro-batches and reads the loss of every part."""
    pipe = pipeline(case, method, **options)
    x, y = torch.randn(2, case.turn, *case.shape[1:])
    return partial(read, pipe, x.split(each), y.split(each))


def read(pipe: Any, xs: Iterable[Any], ys: Iterable[Any]) -> None:
    for x, y in zip(xs, ys, strict=True):
        float(pipe.push(x, y))
