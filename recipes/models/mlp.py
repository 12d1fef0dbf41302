"""A deep perceptron with residual blocks, the model of the demo."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeback.recipes.models.facts import takes


class Residual(nn.Module):
    """x + relu(Linear(LayerNorm(x))), (B, width) -> (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


@takes("inputs")
def residual_mlp(inputs: int, classes: int, width: int = 64, depth: int = 19) -> nn.Sequential:
    """Return `depth` residual blocks and a head, after a linear stage if the input is not `width` wide."""
    stem = [] if inputs == width else [nn.Linear(inputs, width)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))  # the sum of many blocks is large
    return nn.Sequential(*stem, *(Residual(width) for _ in range(depth)), head)
