"""The models that are fuzzed: small lists of layers per stage, of kinds that keep different things for the backward.

All take x (N, 6), but those of `WHOLE`, and give (N, 6). Layers of `RANDOM` models draw numbers, keep statistics or
write into their weights: the recurrence leaves those out, and they are compared with the event loop alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


class Unused(nn.Linear):
    """Has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))


class Gated(nn.Linear):
    """Its graph keeps a buffer, which the user sets."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("gate", torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class Bounded(nn.Linear):
    """Its forward clamps its weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Scaled(nn.Linear):
    """A layer with a constant of its own, which no weight tells of."""

    def __init__(self, by: float) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


class Tied(nn.Module):
    """Two layers of one weight, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.other(x.tanh())


class Turned(nn.Module):
    """Its output lies in memory by columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


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


def _gated(s: int, S: int) -> list[nn.Module]:
    return [Gated(), nn.Tanh()]


def _bounded(s: int, S: int) -> list[nn.Module]:
    return [Bounded(WIDTH, WIDTH), nn.Tanh()]


def _unused(s: int, S: int) -> list[nn.Module]:
    return [Unused(), nn.Tanh()]


def _scaled(s: int, S: int) -> list[nn.Module]:
    return [Scaled(1.036 if s % 2 else 1.0), nn.Tanh()]


def _tied(s: int, S: int) -> list[nn.Module]:
    return [Tied(), nn.Tanh()]


def _turned(s: int, S: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH if s == 0 else 37, WIDTH if s == S - 1 else 37), nn.Tanh(), Turned()]


def _indices(s: int, S: int) -> list[nn.Module]:
    return [nn.Embedding(9, WIDTH)] if s == 0 else _linear(s, S)


def _sparse(s: int, S: int) -> list[nn.Module]:
    return [nn.Embedding(9, WIDTH, sparse=True)] if s == 0 else _linear(s, S)


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
    if s % 2:  # no bias, whose gradient would be what was rounded: Adam would make whole steps of it
        return [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, eps=0.01), nn.ReLU()]
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh()]


def _normed(s: int, S: int) -> list[nn.Module]:
    """Functions of weights, of stages that cannot run as one."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return [layer, nn.Dropout(0.2), nn.Tanh()]


MODELS: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "linear": _linear, "alike": _alike, "mixed": _mixed, "residual": _residual, "convolutional": _convolutional,
    "depthwise": _depthwise, "named": _named, "weighed": _weighed, "spare": _spare, "frozen": _frozen,
    "in place": _in_place, "narrow": _narrow, "dropping": _dropping, "batch": _batch, "unused": _unused,
    "scaled": _scaled, "tied": _tied, "turned": _turned, "indices": _indices, "sparse": _sparse, "gated": _gated,
    "bounded": _bounded, "normed": _normed,
}  # fmt: skip
FOLLOWED = ("followed", "counted")  # forms
DRAWING = ("dropping", "normed")
RANDOM = (*DRAWING, "batch", "bounded")
WHOLE = ("indices", "sparse")  # which take x (N,) of whole numbers below 9
# whose stages may run as one
ALIKE = (
    "linear",
    "alike",
    "residual",
    "convolutional",
    "depthwise",
    "in place",
    "frozen",
    "scaled",  # every other one; neighbours only look alike
)


# methods that run "bounded" on its own weights: copies would lose what its forward writes
OWN_WEIGHTS = ("sgd", "pb-0", "pb-1", "pb-2", "gpipe", "gpipe-3", "gpipe-8", "one_f_one_b", "one_f_one_b-2", "ef")


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


def blocks(form: str, count: int) -> int:
    """How many blocks a model of so many stages has: more where the library is told how many stages to make of them."""
    return 2 * count + 1 if form == "counted" else count


def build(
    name: str, count: int, seed: int, form: str, dtype: torch.dtype = torch.float64
) -> tuple[Any, dict[str, Any]]:
    """The model as a user would give it, and the options that go with its form.

    form: "sequence", "list", "followed", "counted" (followed, and cut by the library) or "meta" (a sequence whose
    values come from a function). Of those that are followed, the option "example" is still to be filled in.
    """
    made = stages(name, blocks(form, count), seed, dtype)
    if form in FOLLOWED:
        names = [f"blocks.{s}" for s in range(1, count)]
        return Followed(list(made)), {"stages": count if form == "counted" else names or 1, "example": None}
    if form == "meta":
        values = [stage.state_dict() for stage in made]
        for s, stage in enumerate(made):
            stage.number = s  # type: ignore[assignment]
        return nn.Sequential(*made).to("meta"), {"init": partial(_once, values)}
    return (nn.Sequential(*made) if form == "sequence" else made), {}


def _once(values: list[Any], stage: nn.Module) -> None:
    """Fill in the values of a stage; for the second time others, as a function that draws them does."""
    own = values[stage.number]  # type: ignore[index]
    stage.load_state_dict(own)
    for value in own.values():
        value += 1


def sloping(output: Tensor, target: Tensor) -> Tensor:
    """A loss that differentiates something itself."""
    loss = nn.functional.mse_loss(output, target)
    (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + slope.square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": nn.functional.mse_loss, "sloping": sloping}
