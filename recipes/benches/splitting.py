"""What splitting any model costs: seconds of cutting resnet50, and what handing structures and skips along adds."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipeback
from pipeback.recipes.benches.network import interleaved, sgd
from pipeback.recipes.foreign import build

STAGES, COUNT = 12, 24  # micro-batches a turn
SIZES = {"width 448, 128 samples": (448, 128), "width 8, a sample": (8, 1)}  # some milliseconds a stage, and nothing


class Masked(nn.Module):
    """y + relu(linear(norm(x)·mask)), the mask kept here, and y = x but in the last block, which adds its input."""

    def __init__(self, width: int, samples: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("mask", kept(width, samples))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x) * self.mask))


class Handing(nn.Module):
    """The same of a dictionary, in which mask and skip travel with x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = state["x"]
        return state | {"x": x + torch.relu(self.linear(self.norm(x) * state["mask"]))}


class Handed(nn.Module):
    """Blocks that hand a dictionary along; what the first one is given is added behind the last."""

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
    """As above, what is added being at hand."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x)


def kept(width: int, samples: int) -> Tensor:
    """Most of the numbers, the same ones always."""
    return (torch.rand(samples, width, generator=torch.Generator().manual_seed(0)) > 0.1).float()


def main(repeats: int) -> None:
    print("torchvision's resnet50, a Pipeline built and a first micro-batch of 2 pictures rehearsed")
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
        print(f"{f'a stage a {cuts}, {pipe.stages} stages':<30}{split:>6.2f} s to split{ready:>8.2f} s until ready")
    print(f"\n{STAGES} stages that hand on a dictionary with a mask and a long skip, over an nn.Sequential of the same "
          "arithmetic; pb")  # fmt: skip
    print(f"{'':<24}{'ms a stage':>12}{'of the plain stages':>22}{'   spread':>16}{'µs a boundary':>16}")
    for name, (width, samples) in SIZES.items():
        handed(name, width, samples, repeats)


def handed(name: str, width: int, samples: int, repeats: int) -> None:
    """Turns of both."""
    torch.manual_seed(0)
    x, y = torch.randn(2, samples, width)
    mask = kept(width, samples)
    plain = nn.Sequential(nn.Linear(width, width), *[Masked(width, samples) for _ in range(STAGES - 2)])
    common: dict[str, Any] = dict(loss=mse_loss, optimizer=sgd, method="pb")
    pipes = {
        "plain": (pipeback.Pipeline(plain.append(Head(width, width)), **common), x),
        "handed": (
            pipeback.Pipeline(Handed(width), **common, stages="block", example={"x": x, "mask": mask}),
            {"x": x, "mask": mask},
        ),
    }
    assert {pipe.stages for pipe, _ in pipes.values()} == {STAGES}
    count = COUNT if samples > 1 else 10 * COUNT
    seconds = interleaved({key: partial(pushed, pipe, x, y, count) for key, (pipe, x) in pipes.items()}, repeats)
    ratios = [a / b for a, b in zip(seconds["handed"], seconds["plain"], strict=True)]
    more = statistics.median(a - b for a, b in zip(seconds["handed"], seconds["plain"], strict=True))
    own = statistics.median(seconds["handed"]) / count
    print(f"{name:<24}{own / STAGES * 1e3:>12.3f}{statistics.median(ratios):>22.3f}"
          f"{min(ratios):>10.3f} … {max(ratios):.3f}{more / count / (STAGES - 1) * 1e6:>16.1f}")  # fmt: skip


def pushed(pipe: pipeback.Pipeline, x: Any, y: Tensor, count: int) -> None:
    for _ in range(count):
        pipe.push(x, y)
