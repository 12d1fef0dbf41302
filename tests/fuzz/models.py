"""The models that are fuzzed: small lists of layers per stage, of kinds that keep different things for the backward.

All take x (N, 6) and give (N, 6). Layers of `RANDOM` models draw numbers or keep statistics: the recurrence leaves
those out, and they are compared with the event loop alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Residual(nn.Module):
    """x + f(x), the sum in place."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return y


class Named(nn.Sequential):
    """Its layers one after the other, called by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(input=x)
        return x


class Weighed(nn.Linear):
    """Computes with a function of its weights, for more than two samples."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.tanh() if len(x) > 2 else self.weight, self.bias)


class Spare(nn.Linear):
    """Has a weight that it does not use, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([[0.5]]).expand(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask)


class Followed(nn.Module):
    """A model with a forward of its own, which is followed."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _linear(s: int, S: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh()] if s < S - 1 else [nn.Linear(WIDTH, WIDTH)]


def _mixed(s: int, S: int) -> list[nn.Module]:
    """Widths that change, stages of one layer, stages without weights."""
    kinds: list[list[nn.Module]] = [
        [nn.Linear(WIDTH, 4), nn.ReLU(inplace=True), nn.Linear(4, WIDTH, bias=False)],
        [nn.GELU()],
        [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)],
        [nn.SiLU(), nn.Linear(WIDTH, WIDTH)],
        [Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))],
    ]
    return kinds[s % len(kinds)] if s < S - 1 else [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]


def _residual(s: int, S: int) -> list[nn.Module]:
    return [Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Tanh()]


def _convolutional(s: int, S: int) -> list[nn.Module]:
    before: list[nn.Module] = [nn.Unflatten(1, (2, 3))] if s == 0 else []
    after: list[nn.Module] = [nn.Flatten(), nn.Linear(WIDTH, WIDTH)] if s == S - 1 else []
    return [*before, nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU(inplace=True), *after]


def _depthwise(s: int, S: int) -> list[nn.Module]:
    before: list[nn.Module] = [nn.Unflatten(1, (2, 3))] if s == 0 else []
    after: list[nn.Module] = [nn.Flatten()] if s == S - 1 else []
    return [*before, nn.Conv1d(2, 2, 3, padding=1, groups=2), nn.Tanh(), *after]


def _alike(s: int, S: int) -> list[nn.Module]:
    return [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()]


def _named(s: int, S: int) -> list[nn.Module]:
    return [Named(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Tanh()]


def _weighed(s: int, S: int) -> list[nn.Module]:
    return [Weighed(WIDTH, WIDTH), nn.Tanh()]


def _spare(s: int, S: int) -> list[nn.Module]:
    return [Spare(), nn.Tanh()]


def _frozen(s: int, S: int) -> list[nn.Module]:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return [layer, nn.Tanh()]


def _in_place(s: int, S: int) -> list[nn.Module]:
    return [nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]


def _narrow(s: int, S: int) -> list[nn.Module]:
    width = 2 if S > 2 else WIDTH
    layer = nn.Linear(WIDTH if s == 0 else width, WIDTH if s == S - 1 else width)
    return [layer, nn.ReLU()]


def _dropping(s: int, S: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0 if S % 2 else 0.2), nn.Tanh()]


def _batch(s: int, S: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()] if s % 2 else [nn.Linear(WIDTH, WIDTH)]


MODELS: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "linear": _linear, "alike": _alike, "mixed": _mixed, "residual": _residual, "convolutional": _convolutional,
    "depthwise": _depthwise, "named": _named, "weighed": _weighed, "spare": _spare, "frozen": _frozen,
    "in place": _in_place, "narrow": _narrow, "dropping": _dropping, "batch": _batch,
}  # fmt: skip
RANDOM = ("dropping", "batch")
# whose stages may run as one
ALIKE = (
    "linear",
    "alike",
    "residual",
    "convolutional",
    "depthwise",
    "in place",
    "frozen",
)


def trained(module: nn.Module) -> list[str]:
    """The names of its weights that are trained: those that are neither frozen nor unused."""
    return [n for n, p in module.named_parameters() if p.requires_grad and not n.endswith("spare")]


def stages(name: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> list[nn.Sequential]:
    """The model's stages, with the values that belong to the seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    made = [nn.Sequential(*MODELS[name](s, count)).to(dtype) for s in range(count)]
    torch.set_rng_state(state)
    return made


def build(
    name: str, count: int, seed: int, form: str, dtype: torch.dtype = torch.float64
) -> tuple[Any, dict[str, Any]]:
    """The model as a user would give it, and the options that go with its form: "sequence", "list", "followed"."""
    made = stages(name, count, seed, dtype)
    if form == "followed":
        names = [f"blocks.{s}" for s in range(1, count)]
        return Followed(list(made)), {"stages": names or 1, "example": torch.randn(2, WIDTH, dtype=dtype)}
    return (nn.Sequential(*made) if form == "sequence" else made), {}


def sloping(output: Tensor, target: Tensor) -> Tensor:
    """A loss that differentiates something itself."""
    loss = nn.functional.mse_loss(output, target)
    (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + slope.square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": nn.functional.mse_loss, "sloping": sloping}
