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


class Batched(nn.Module):
    """A convolution over the length, and a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(self.conv(h.transpose(1, 2))).transpose(1, 2)


class Decoder(nn.Module):
    """Attends to an average of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h, h.mean(1, keepdim=True))


class Frozen(nn.Module):
    """Adds what a layer makes of its input whose weights are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) + self.fixed(h).tanh()


class StraightThrough(torch.autograd.Function):
    """The sign, whose gradient is that of its input."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Binary(nn.Module):
    """Multiplies by the sign of a layer, by an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h * StraightThrough.apply(self.layer(h))  # type: ignore[no-untyped-call]


class Quantized(nn.Module):
    """Looks up what its input is nearest to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h.detach(), self.table.weight.detach().unsqueeze(0).expand(len(h), -1, -1)).argmin(-1)
        return h + self.table(nearest)


class Several(nn.Module):
    """Runs its layers in a loop, and a list of their outputs through a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.weights = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2)])

    def forward(self, h: Tensor) -> Tensor:
        outputs = [layer(h) * weight for layer, weight in zip(self.layers.values(), self.weights, strict=True)]
        return torch.stack(outputs, -1).amax(-1)


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
    "identity": nn.Identity,
    "batched": Batched,
    "frozen": Frozen,
    "binary": Binary,
    "quantized": Quantized,
    "several": Several,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "prelu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()),
    "rnn": lambda: Recurrent(nn.RNN),
    "decoder": Decoder,
}
DRAWING = ("dropout",)
RECURRENT = ("gru", "lstm", "rnn")  # what they return is transposed
OF_WEIGHTS = ("weight norm", "orthogonal", "spectral")  # whose weights are functions of others
