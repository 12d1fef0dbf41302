"""U-Net: a plain U-Net, with long skips from the downward path to the upward path."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeback.recipes.foreign.case import CLASSES, Case


class Double(nn.Module):
    """Convolution, GroupNorm and ReLU, twice."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    """(B, 3, H, W) -> scores per pixel (B, CLASSES, H, W)."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**n for n in range(depth + 1)]
        self.start = Double(3, width)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(sizes))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(Double(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), []
        for down in self.down:
            skips.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for grow, up, skip in zip(reversed(self.grow), reversed(self.up), reversed(skips), strict=True):
            x = up(torch.cat([skip, grow(x)], dim=1))
        return self.head(x)


def unet() -> Case:
    """A class for every pixel."""

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        classes = torch.randint(CLASSES, (1, 32, 32), generator=generator)
        return torch.randn(1, 3, 32, 32, generator=generator), classes

    return Case(UNet(), batch, cross_entropy)
