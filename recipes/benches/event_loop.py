"""Times pushes of the event loop over the plain PyTorch loop: one process, one thread, micro-batch 1.

`by hand` is what torch alone takes for `pb`'s forwards, backwards and steps (`by_hand`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

from torch import nn

from pipeback.recipes.benches.against import Rows
from pipeback.recipes.benches.by_hand import by_hand
from pipeback.recipes.benches.contenders import Contender, plain, pushed
from pipeback.recipes.benches.network import create, network
from pipeback.recipes.benches.tasks import NETWORKS, Network, Task
from pipeback.recipes.benches.turns import spread, take_turns
from pipeback.recipes.markdown import table

METHODS = ("pb", "cerebras", "sgd", "sc", "lwp", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b")
RESNET = NETWORKS["resnet20"]


def whole_blocks() -> nn.Sequential:
    """ResNet-20 with both halves of a residual block in one stage."""
    stem, *halves, head = RESNET.build()
    return nn.Sequential(stem, *map(nn.Sequential, halves[::2], halves[1::2]), head)


CASES = {
    "20 blocks of width 64": (Task(Network("blocks", "", network, (64,), {}, 10), 1, 150), METHODS),
    "ResNet-20, one stage per block": (Task(RESNET._replace(build=whole_blocks), 1, 16), METHODS[:2]),
    "ResNet-20, one stage per layer": (Task(RESNET, 1, 16), METHODS[:2]),
}


def main(repeats: int) -> None:
    print("One process, one thread, micro-batch 1.")
    for words, (task, methods) in CASES.items():
        runs: dict[str, Contender] = {"plain loop": plain(task, task.turn)}
        runs["by hand"] = by_hand(task)
        for name in methods:
            runs[name] = pushed(task, create(name, len(task.model())))
        seconds = {name: [1 / rate for rate in some] for name, some in take_turns(runs, repeats).items()}
        rows = []
        for name, some in seconds.items():
            ratios = [a / b for a, b in zip(seconds["plain loop"], some, strict=True)]
            pipe = runs[name].pipe
            count = len(pipe.delays) if pipe else "–"
            label = f"`{name}`" if pipe else name
            rows.append([label, count, f"{statistics.median(some) * 1e3:.2f}", spread(ratios)])
        print("\n" + table([words, "stages", "ms/micro-batch", "of the plain loop"], rows), flush=True)


def rows() -> Rows:
    """What `against=` compares."""
    return {
        (words, f"`{name}`"): partial(train, task, name) for words, (task, methods) in CASES.items() for name in methods
    }


def train(task: Task, method: str, turns: Iterable[None]) -> None:
    contender = pushed(task, create(method, len(task.model())))
    for _ in turns:
        contender.run()
