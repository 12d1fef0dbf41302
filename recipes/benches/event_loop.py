"""One process, one thread, 20 stages of width 64, micro-batch 1: a push of 150 over the plain PyTorch loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pipeback.recipes.benches.network import interleaved, network, pipeline, sgd

METHODS = ("pb", "cerebras", "sgd", "sc", "lwp", "pipedream", "spectrain", "pipemare", "gpipe", "one_f_one_b")


def main(repeats: int, count: int = 150) -> None:
    x, y = torch.randn(count, 64), torch.randint(0, 10, (count,))
    model = network()
    optimizer = sgd(model.parameters())

    def plain() -> None:
        for i in range(count):
            cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    runs: dict[str, Callable[[], Any]] = {"plain loop": plain}
    for name in METHODS:
        pipe = pipeline(name, micro_batch_size=1)
        runs[name] = partial(pipe.push, x, y)
    seconds = interleaved(runs, repeats)
    print("one process, one thread: 20 stages of width 64, micro-batch 1")
    print(f"{'':<14}{'ms a micro-batch':>18}{'of the plain loop':>20}{'   spread':>16}")
    for name, some in seconds.items():
        ratios = [a / b for a, b in zip(seconds["plain loop"], some, strict=True)]
        print(f"{name:<14}{statistics.median(some) / count * 1e3:>18.3f}{statistics.median(ratios):>20.2f}"
              f"{min(ratios):>10.2f} … {max(ratios):.2f}")  # fmt: skip
