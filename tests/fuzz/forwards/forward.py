"""A forward of its own: the steps between a first and a last layer, and how the model is trained.

A forward's repr is Python that makes it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipeback

from ..program import Seen
from ..replayed import Replayed
from .layers import DRAWING, LAYERS, OF_WEIGHTS, RECURRENT, WIDTH
from .steps import RANDOM, ROUNDED, STEPS, TRANSPOSED, call

FORMS: dict[str, list[tuple[int, int]]] = {  # samples and length, push by push
    "same": [(4, 5)],
    "fewer": [(4, 5), (4, 5), (2, 5)],
    "sizes": [(4, 5), (3, 5), (5, 5), (4, 5), (1, 5)],
    "lengths": [(4, 5), (4, 5), (4, 6), (4, 3)],
    "both": [(3, 5), (4, 4), (2, 7)],
}


@dataclass(frozen=True, repr=False)
class Forward(Replayed):
    """A model and its training.

    layers: names of `LAYERS`. steps: each a name of `STEPS`, or the number of a layer that is called; how many values
    before the newest the other one was made; and an option. gathers: whether the last layer gets a sum of all values.
    method, stages, form: of the training; form is a name of `FORMS`. runtime: options that must not change a number.
    resume: the push before which it goes on from a state in another pipeline.
    """

    layers: tuple[str, ...] = ()
    steps: tuple[tuple[str | int, int, bool], ...] = ()
    gathers: bool = False
    seed: int = 0
    method: str = "pb"
    stages: Any = "layer"
    form: str = "same"
    pushes: int = 6
    runtime: dict[str, Any] = field(default_factory=dict)
    resume: int | None = None

    @property
    def called(self) -> set[str]:
        """The kinds of layers that are called."""
        return {self.layers[step] for step, *_ in self.steps if isinstance(step, int)}

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, which a pipeline takes from streams of its stages."""
        return bool(self.called & {*DRAWING}) or any(step in RANDOM for step, *_ in self.steps)

    @property
    def rounds(self) -> bool:
        """Whether its values are too rough to be compared but for their bits."""
        return any(step in ROUNDED for step, *_ in self.steps)

    @property
    def transposes(self) -> bool:
        """Whether a product may take a transposed input and a weight that is no parameter of its stage."""
        given = self.called & {*RECURRENT} or any(step in TRANSPOSED for step, *_ in self.steps)
        again = any([step for step, *_ in self.steps].count(n) > 1 for n in range(len(self.layers)))
        return bool(given) and (again or bool(self.called & {*OF_WEIGHTS}) or any(s == "tied" for s, *_ in self.steps))

    def data(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        generator, shapes = torch.Generator().manual_seed(self.seed), FORMS[self.form]
        drawn = [torch.randn(2, *shapes[n % len(shapes)], WIDTH, generator=generator) for n in range(self.pushes)]
        return [(x, y) for x, y in (both.to(dtype) for both in drawn)]

    def trained(self, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Seen, int]:
        """What a pipeline with these options shows, and its number of stages."""
        options = {"method": self.method, "stages": self.stages, **options}
        resume, data, on = options.pop("resume", None), self.data(dtype), pipeback.Debug(stop_at_nan=False)

        def made(seed: int) -> pipeback.Pipeline:
            model = Model(self).to(dtype)
            torch.manual_seed(seed)
            return pipeback.Pipeline(model, loss=mse_loss, optimizer=sgd, example=data[0][0], debug=on, **options)

        pipe, losses = made(5), list[Tensor]()
        for n, (x, y) in enumerate(data):
            if n == resume:
                other = made(6)
                other.load_state_dict(pipe.state_dict())
                pipe.close()
                pipe = other
            losses.append(pipe.push(x, y))
        pipe.drain()
        weights = [(name, v.detach().clone()) for name, v in pipe.model.state_dict().items()]
        seen = _seen(losses, weights, pipe.evaluate(data[0][0]))
        pipe.close()
        return seen, pipe.stages

    def plainly(self) -> Seen:
        """What a loop of plain PyTorch shows."""
        model, losses = Model(self), list[Tensor]()
        optimizer = sgd(model.parameters())
        for x, y in self.data(torch.float32):
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            output = model(self.data(torch.float32)[0][0])
        return _seen(losses, list(model.state_dict().items()), output)


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def _seen(losses: list[Tensor], weights: list[tuple[str, Tensor]], output: Tensor) -> Seen:
    shown = [(f"push {n}", loss.detach()) for n, loss in enumerate(losses)]
    held = [(f"weight {name}", value) for name, value in weights]
    return without_nan([*shown, *held, ("evaluated", output.detach())])


def without_nan(seen: Seen) -> Seen:
    """The same with another value for NaN, which equals nothing."""
    return [(at, value.nan_to_num(1e30)) for at, value in seen]


class Model(nn.Module):
    """Does the steps."""

    def __init__(self, of: Forward) -> None:
        super().__init__()
        torch.manual_seed(of.seed)
        self.of = of
        self.first, self.last, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.places = nn.Parameter(torch.ones(WIDTH)), nn.Embedding(8, WIDTH)
        self.register_buffer("fixed", torch.linspace(-1, 1, WIDTH))
        self.layers = nn.ModuleList([LAYERS[name]() for name in of.layers])

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for step, back, option in self.of.steps:
            h, o = values[-1], values[max(0, len(values) - 1 - back)]
            if isinstance(step, int):
                values.append(call(self, h, o, x, step, option))
            else:
                values.append(STEPS[step](self, h, o, x))
        return self.last(values[-1] + sum(values[:-1]) * 0.1 if self.of.gathers else values[-1])
