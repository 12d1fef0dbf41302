"""Convolution: networks for images with one convolution per stage.

They use GroupNorm, because the batch statistics of a micro-batch are poor.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pipeback.recipes.models.facts import takes


class Convolution(nn.Sequential):
    """3x3 convolution, GroupNorm and, optionally, ReLU: (B, inside, H, W) -> (B, outside, H / stride, W / stride)."""

    def __init__(self, inside: int, outside: int, groups: int, stride: int = 1, relu: bool = True) -> None:
        if outside % groups:
            raise ValueError(
                f"model.groups={groups} does not divide the {outside} channels of a layer; see model.width"
            )
        layers = OrderedDict[str, nn.Module](
            conv=nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), norm=nn.GroupNorm(groups, outside)
        )
        if relu:
            layers["relu"] = nn.ReLU()
        super().__init__(layers)


class First(nn.Module):
    """The first half of a residual block: x -> (relu(norm(conv(x))), shortcut of x). The shortcut has no weights."""

    def __init__(self, inside: int, outside: int, groups: int, stride: int) -> None:
        super().__init__()
        self.body = Convolution(inside, outside, groups, stride)
        self.stride, self.grown = stride, outside - inside

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = x[:, :, :: self.stride, :: self.stride]
        if self.grown:  # new channels are zero
            skip = pad(skip, (0, 0, 0, 0, self.grown // 2, self.grown - self.grown // 2))
        return self.body(x), skip


class Second(nn.Module):
    """The second half: (h, skip) -> relu(norm(conv(h)) + skip)."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.body = Convolution(width, width, groups, relu=False)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        h, skip = pair
        return torch.relu(self.body(h) + skip)


def head(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


@takes("channels")
def resnet20(channels: int, classes: int, size: int, width: int = 16, groups: int = 4) -> nn.Sequential:
    """ResNet-20 for small images (He et al., arXiv 1512.03385, section 4.2) in 20 stages: 19 convolutions and a head.

    Within a block, the skip crosses the stage boundary beside the activation, as the second tensor of a pair.
    width: channels of the first third; the others have two and four times as many.
    """
    stages: list[nn.Module] = [Convolution(channels, width, groups)]
    inside = width
    for third in range(3):
        outside = width * 2**third
        for block in range(3):
            stages += [First(inside, outside, groups, 2 if third and not block else 1), Second(outside, groups)]
            inside = outside
    return nn.Sequential(*stages, head(inside, classes))


# channels of the convolutions in units of `width`; M halves the image
PLANS = {
    8: "1 1 M 2 2 M 4 4 4",
    11: "1 M 2 M 4 4 M 8 8 M 8 8",
    13: "1 1 M 2 2 M 4 4 M 8 8 M 8 8",
    16: "1 1 M 2 2 M 4 4 4 M 8 8 8 M 8 8 8",
}


@takes("channels")
def vgg(channels: int, classes: int, size: int, depth: int = 8, width: int = 16, groups: int = 4) -> nn.Sequential:
    """VGG (Simonyan and Zisserman, arXiv 1409.1556) for small images: `depth` layers with weights, one per stage.

    Depths 11, 13 and 16 have the paper's convolutions and one linear layer, with width 64 the paper's channels; then
    depth - 2 convolutions, since the paper has three linear layers. 8 is a small one. A pool belongs to the stage of
    the convolution before it, and is left out once the picture is one pixel.
    """
    if depth not in PLANS:
        raise ValueError(f"model.depth={depth}: vgg has depths {', '.join(map(str, PLANS))}")
    stages: list[nn.Sequential] = []
    inside = channels
    for step in PLANS[depth].split():
        if step != "M":
            stages.append(Convolution(inside, int(step) * width, groups))
            inside = int(step) * width
        elif size > 1:
            stages[-1].append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(*stages, head(inside, classes))
