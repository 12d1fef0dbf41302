"""One process, one thread, micro-batch 1: the event loop's pushes over the plain PyTorch loop."""

from __future__ import annotations

import statistics

from pipeback.recipes.benches.contenders import Contender, plain, pushed
from pipeback.recipes.benches.network import create, network
from pipeback.recipes.benches.tasks import NETWORKS, Network, Task

METHODS = ("pb", "cerebras", "sgd", "sc", "lwp", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b")
CASES = {
    "20 blocks of width 64": (Task(Network("blocks", "", network, (64,), {}, 10), 1, 150), "auto", METHODS),
    "ResNet-20, a stage a block": (Task(NETWORKS["resnet20"], 1, 16), "block", METHODS[:2]),
    "ResNet-20, a stage a layer": (Task(NETWORKS["resnet20"], 1, 16), "layer", METHODS[:2]),
}


def main(repeats: int) -> None:
    print(f"{'one process, one thread, micro-batch 1':<42}{'stages':>8}{'ms a micro-batch':>18}"
          f"{'of the plain loop':>20}{'   spread':>16}")  # fmt: skip
    for words, (task, stages, methods) in CASES.items():
        runs: dict[str, Contender] = {"plain loop": plain(task, task.turn)}
        for name in methods:
            runs[name] = pushed(task, create(name, len(task.model())), stages=stages)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 1):
            for name, contender in runs.items():
                found = contender.run()
                if turn:
                    seconds[name].append(found / task.turn)
        for name, some in seconds.items():
            ratios = [a / b for a, b in zip(seconds["plain loop"], some, strict=True)]
            pipe = runs[name].pipe
            count = len(pipe.delays) if pipe else ""
            print(f"{words + ': ' + name:<42}{count:>8}{statistics.median(some) * 1e3:>18.3f}"
                  f"{statistics.median(ratios):>20.2f}{min(ratios):>10.2f} … {max(ratios):.2f}",
                  flush=True)  # fmt: skip
