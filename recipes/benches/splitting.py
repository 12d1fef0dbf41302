"""Measures the cost of splitting: seconds of cutting resnet50, and the overhead of handing on dictionaries."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.recipes.benches.network import sgd
from pipeback.recipes.foreign import build
from pipeback.recipes.markdown import table

STAGES, COUNT = 12, 6  # micro-batches per turn
# at any other rate than 0, thousands of updates of one micro-batch diverge
STILL = partial(torch.optim.SGD, lr=0.0, momentum=0.999, weight_decay=1e-4, foreach=True)
SIZES = {"width 448, 128 samples": (448, 128), "width 8, one sample": (8, 1)}  # ms per stage; next to none


class Masked(nn.Module):
    """x + relu(linear(norm(x)·mask)), with a mask of its own."""

    def __init__(self, width: int, samples: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("mask", kept(width, samples))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x) * self.mask))


class Handing(nn.Module):
    """The same block on a dictionary, in which mask and skip travel with x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = state["x"]
        return state | {"x": x + torch.relu(self.linear(self.norm(x) * state["mask"]))}


class Handed(nn.Module):
    """Blocks that pass a dictionary on; the input of the first is added after the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Handing(width) for _ in range(STAGES - 2))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.start(x)
        state = {"x": x, "mask": mask, "skip": x}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"] + state["skip"])


class Head(nn.Linear):
    """The head of the plain stages, which adds its own input in place of the skip."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x)


def kept(width: int, samples: int) -> Tensor:
    """A fixed mask that keeps most of the numbers."""
    return (torch.rand(samples, width, generator=torch.Generator().manual_seed(0)) > 0.1).float()


def main(repeats: int) -> None:
    print("torchvision's resnet50: a Pipeline is built and a first micro-batch of 2 pictures rehearsed.\n")
    rows = []
    case = build("resnet50")
    x, y = case.batch(torch.Generator().manual_seed(0))
    for cuts in case.cuts:
        seconds = []
        for _ in range(min(repeats, 3)):
            begin = time.perf_counter()
            pipe = pipeback.Pipeline(case.model, loss=case.loss, optimizer=sgd, method="pb", stages=cuts, example=x)
            built = time.perf_counter() - begin
            pipe.plan(x, y)
            seconds.append((built, time.perf_counter() - begin))
        split, ready = (statistics.median(some) for some in zip(*seconds, strict=True))
        rows.append([f"one stage per {cuts}", pipe.stages, f"{split:.2f}", f"{ready:.2f}"])
    print(table(["resnet50", "stages", "seconds to split", "seconds until ready"], rows))
    print(f"\n{STAGES} stages that hand on a dictionary with a mask and a long skip, over an nn.Sequential of the same "
          "arithmetic; `pb`, time of the processor.\n")  # fmt: skip
    rows = [[name, *handed(*size, repeats)] for name, size in SIZES.items()]
    print(table(["", "ms/stage", "of the plain stages (quartiles)", "µs/boundary"], rows))


def handed(width: int, samples: int, repeats: int) -> list[str]:
    """Run turns of both models; the cells of a row."""
    torch.manual_seed(0)
    x, y = torch.randn(2, samples, width)
    mask = kept(width, samples)
    plain = nn.Sequential(nn.Linear(width, width), *[Masked(width, samples) for _ in range(STAGES - 2)])
    common: dict[str, Any] = dict(loss=mse_loss, optimizer=STILL, method="pb")
    pipes = {
        "plain": (pipeback.Pipeline(plain.append(Head(width, width)), **common), x),
        "handed": (
            pipeback.Pipeline(Handed(width), **common, stages="block", example={"x": x, "mask": mask}),
            {"x": x, "mask": mask},
        ),
    }
    assert {pipe.stages for pipe, _ in pipes.values()} == {STAGES}
    count = COUNT if samples > 1 else 10 * COUNT
    for pipe, x in pipes.values():
        pushed(pipe, x, y, 3 * STAGES)
    seconds: dict[str, list[float]] = {key: [] for key in pipes}
    for _ in range(4 * repeats):  # short turns, in CPU seconds of this thread: other load counts less
        for key, (pipe, x) in pipes.items():
            begin = time.thread_time()
            pushed(pipe, x, y, count)
            seconds[key].append(time.thread_time() - begin)
    ratios = [a / b for a, b in zip(seconds["handed"], seconds["plain"], strict=True)]
    more = statistics.median(a - b for a, b in zip(seconds["handed"], seconds["plain"], strict=True))
    own = statistics.median(seconds["handed"]) / count
    low, *_, high = statistics.quantiles(ratios, n=4)
    return [f"{own / STAGES * 1e3:.3f}", f"{statistics.median(ratios):.3f} ({low:.3f} … {high:.3f})",
            f"{more / count / (STAGES - 1) * 1e6:.1f}"]  # fmt: skip


def pushed(pipe: pipeback.Pipeline, x: Any, y: Tensor, count: int) -> None:
    for _ in range(count):
        pipe.push(x, y)
