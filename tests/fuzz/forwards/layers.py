"""Layers that the forwards of the search call: one of each kind that a trace treats in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Pair(nn.Module):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.layer(h).chunk(2, -1)
        return first, second.tanh()


class Named(nn.Module):
    """Takes a number and perhaps a tensor by name, and returns a dictionary with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> dict[str, Any]:
        y = self.layer(h) * scale
        return {"y": y if extra is None else y + extra, "more": [h.mean(-1, keepdim=True)]}


class Averaging(nn.Module):
    """Subtracts an average of its inputs, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
        return self.layer(h - self.mean)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)[0]


class Attention(nn.Module):
    """Takes a mask, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        n = self.norm(h)
        return h + self.layer(n, n, n, attn_mask=mask, need_weights=False)[0]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        y += h
        return y.relu_()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "perceptron": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH)),
    "pair": Pair,
    "named": Named,
    "averaging": Averaging,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "attention": Attention,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "in place": InPlace,
    "in place first": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Dropout(0.2),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True),
    "rms": lambda: nn.RMSNorm(WIDTH),
}
DRAWING = ("dropout",)
RECURRENT = ("gru", "lstm")  # what they return is transposed
OF_WEIGHTS = ("weight norm",)  # whose weights are functions of others
