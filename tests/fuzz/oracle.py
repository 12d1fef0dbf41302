"""What training should give: the recurrence of `tests/laws/reference.py` over stages of any layers, in float64.

A backward on other weights than its forward's is taken layer by layer: what reaches a layer's input, for what reaches
its output, at the input that the forward had and with the weights that the backward has. That is what autograd does
where a graph keeps inputs, and weights are exchanged under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.laws.reference import Array, Tensors

from .models import Residual, trained


class Network:
    """Stages of layers, and a mean squared error; shaped like `tests.laws.reference.Layers`."""

    def __init__(self, stages: Sequence[nn.Sequential], slope: bool = False) -> None:
        """slope: the loss has the square of its own gradient besides, see `models.sloping`."""
        self.stages, self.slope = stages, slope
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, nn.ReLU):
                    module.inplace = False

    def initial(self) -> list[Tensors]:
        return [tuple(stage.get_parameter(n).detach().numpy().copy() for n in trained(stage)) for stage in self.stages]

    def forward(self, s: int, w: Tensors, x: Array) -> tuple[Array, Any]:
        y, kept = _forward(self.stages[s], [torch.from_numpy(p) for p in w], torch.from_numpy(x))
        return y.numpy(), kept

    def backward(self, s: int, w: Tensors, kept: Any, g: Array) -> tuple[Tensors, Array]:
        own, g_in = _backward(self.stages[s], [torch.from_numpy(p) for p in w], kept, torch.from_numpy(np.array(g)))
        return tuple(p.numpy() for p in own), g_in.numpy()

    def loss(self, output: Array, target: Array) -> tuple[float, Array]:
        error = output - target
        g = 2 * error / error.size
        if not self.slope:
            return float((error * error).mean()), g
        return float((error * error).mean() + (g * g).sum()), g + 4 * g / error.size

    def output(self, weights: Sequence[Tensors], x: Array) -> Array:
        for s, w in enumerate(weights):
            x, _ = self.forward(s, w, x)
        return x


def _parts(module: nn.Module) -> list[nn.Module] | None:
    if isinstance(module, Residual):
        return list(module.inner)
    return list(module) if isinstance(module, nn.Sequential) else None  # `Named`, too


def _forward(module: nn.Module, w: list[Tensor], x: Tensor) -> tuple[Tensor, Any]:
    """What a module gives, and the inputs of its layers."""
    parts, y, kept, first = _parts(module), x, [], 0
    if parts is None:
        with torch.no_grad():
            return functional_call(module, _named(module, w), (x,)), x
    for part in parts:
        count = len(trained(part))
        y, needed = _forward(part, w[first : first + count], y)
        kept.append(needed)
        first += count
    return (y + x if isinstance(module, Residual) else y), kept


def _backward(module: nn.Module, w: list[Tensor], kept: Any, g: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients of its weights, in their order, and of its input."""
    parts = _parts(module)
    if parts is None:
        x, own = kept.clone().requires_grad_(kept.is_floating_point()), [p.clone().requires_grad_() for p in w]
        y = functional_call(module, _named(module, own), (x,))
        if not x.requires_grad:  # whole numbers
            return [v.to_dense() for v in torch.autograd.grad(y, own, g)], torch.zeros(())
        *found, g_in = torch.autograd.grad(y, [*own, x], g)
        return found, g_in
    own, g_out, last = [], g, len(w)
    for part, needed in zip(reversed(parts), reversed(kept)):
        count = len(trained(part))
        found, g = _backward(part, w[last - count : last], needed, g)
        own, last = [*found, *own], last - count
    return own, (g + g_out if isinstance(module, Residual) else g)


def _named(module: nn.Module, w: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(trained(module), w, strict=True))
