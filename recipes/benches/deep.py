"""Times what happens once in pipelines of many stages: construction, first push, and saving and loading a state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeback.recipes.benches.network import create, pipeline
from pipeback.recipes.benches.turns import on_ranks
from pipeback.recipes.markdown import table

SIZES, WIDTH = (16, 256, 1024), 8
AS_ONE = (16, 64, 256)  # stages that run as one at most
FLYING = 8  # micro-batches that have been pushed when a state is saved
STEPS = ("construction", "first push", "both", "state_dict", "load_state_dict")


def main(repeats: int, sizes: Sequence[int] = SIZES, as_one: Sequence[int] = AS_ONE) -> None:
    print(f"`pb`, stages of width {WIDTH}: seconds, medians. States have {FLYING} micro-batches in flight.\n")
    rows = []
    for label, vectorize, some in (("event loop", False, sizes), ('`vectorize="auto"`', "auto", as_one)):
        for stages in some:
            found = on_ranks(seconds, stages, vectorize, min(repeats, 3), ranks=1)
            rows.append([label, stages, *(f"{statistics.median(found[step]):.2f}" for step in STEPS)])
    print(table(["", "stages", *STEPS], rows), flush=True)


def seconds(rank: int, store: str, stages: int, vectorize: bool | str, repeats: int) -> dict[str, list[float]]:
    """The seconds of every step, each of new pipelines; a small one has loaded what is loaded once."""
    found: dict[str, list[float]] = {step: [] for step in STEPS}
    x, y = torch.randn(FLYING, WIDTH), torch.randint(0, 10, (FLYING,))

    def build(count: int) -> Any:
        return pipeline(create("pb", count), count, WIDTH, micro_batch_size=1, vectorize=vectorize)

    def timed(step: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = work()
        found[step].append(time.perf_counter() - begin)
        return made

    build(4).push(x, y)
    for _ in range(repeats):
        pipe = timed("construction", lambda: build(stages))
        timed("first push", lambda pipe=pipe: pipe.push(x[:1], y[:1]))  # type: ignore[misc]
        found["both"].append(found["construction"][-1] + found["first push"][-1])
        pipe.push(x[1:], y[1:])
        state, other = timed("state_dict", pipe.state_dict), build(stages)
        timed("load_state_dict", lambda other=other, state=state: other.load_state_dict(state))  # type: ignore[misc]
    return found
