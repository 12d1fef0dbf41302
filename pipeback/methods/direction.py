"""Direction: along what an optimizer's own step moves a weight, without rate and decoupled decay.

    SGD              d = v, without momentum g       v ← m·v + (1 − τ)·g
    Adam, AdamW      d = m̂ / (√q̂ + ε)                bias-corrected
    RMSprop          d = g / (√q + ε), with momentum its buffer of these

g has its sign and a weight decay that is not decoupled. It is 0 before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.adam import is_adam, moments
from pipeback.methods.base import OptimizerLike, Weights
from pipeback.methods.columns import positive
from pipeback.methods.gradients import entering
from pipeback.methods.momentum import LWP_OF_WEIGHTS

Group = dict[str, Any]


def require_direction(optimizer: Any, method: str) -> None:
    """Raise a ValueError unless the step of the optimizer is one of the equations."""
    sgd, found = isinstance(optimizer, torch.optim.SGD), type(optimizer).__name__
    if sgd and any(group["nesterov"] for group in optimizer.param_groups):
        raise ValueError(
            f"{method} predicts along the velocity, but nesterov=True; set it to False or use {LWP_OF_WEIGHTS}"
        )
    if not (sgd or is_adam(optimizer) or isinstance(optimizer, torch.optim.RMSprop)):
        raise ValueError(
            f"{method} predicts by the step of SGD, Adam, AdamW or RMSprop, but the optimizer is {found}"
            f"{' with amsgrad' if isinstance(optimizer, torch.optim.Adam) else ''}; use {LWP_OF_WEIGHTS}"
        )


def step_along(optimizer: OptimizerLike, weights: Weights, into: Weights, delays: Sequence[float]) -> None:
    """Make the optimizer's step, and write its direction into `into`, one tensor per weight that has a delay.

    A weight without a gradient, which the step leaves alone, keeps its direction.
    """
    place = {id(w): n for n, w in enumerate(weights) if positive(delays[n]) and w.grad is not None}
    raw = [(group, [w for w in group["params"] if id(w) in place]) for group in optimizer.param_groups]
    bare = {id(w): entering(w, group) for group, params in raw for w in params if _bare(group)}
    optimizer.step()
    for group, params in raw:
        if not params:
            continue
        if "betas" in group:
            of = moments(optimizer, group, params)
            numbers = [place[id(w)] for w in of.weights]
            found = torch._foreach_div(of.first, of.roots(group["eps"]))
            torch._foreach_div_(found, of.first_corrections)
        else:
            numbers = [place[id(w)] for w in params]
            found = tuple(_along(optimizer.state.get(w, {}), bare.get(id(w)), group) for w in params)
        torch._foreach_copy_([into[n] for n in numbers], found)


def _bare(group: Group) -> bool:
    """Whether the direction is made of the gradient itself."""
    return "betas" not in group and not group["momentum"]


def _along(entry: dict[str, Any], g: Tensor | None, group: Group) -> Tensor:
    """The direction of one weight, after the step."""
    if g is None:
        found: Tensor = entry["momentum_buffer"]
        return found
    if "square_avg" not in entry:
        return g
    below: Tensor = entry["square_avg"]
    if group["centered"]:
        below = below.addcmul(entry["grad_avg"], entry["grad_avg"], value=-1)
    return g / below.sqrt().add_(group["eps"])
