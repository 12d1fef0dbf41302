"""Momentum SGD opened up: its velocity, a spiked step, and the scaling of its hyper-parameters.

    g ← ±∇f + λ·w        v ← m·v + g        w ← w − η·(a·v + b·g)        (torch.optim.SGD: a = 1, b = 0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.method import OptimizerLike, Weights, add_scaled


def scale_hyperparameters(rate: float, momentum: float, reference: int, size: int) -> tuple[float, float]:
    """Rate and momentum for another update size: keeps the decay time and the total step a sample.

        m = m_r^(N/N_r)          η = η_r · (N/N_r) · (1 − m)/(1 − m_r)

    rate, momentum: η_r and m_r, tuned at `reference` = N_r samples an update; size: N, the new update size.
    Returns (η, m). Kosson et al., arXiv 2003.11666; Chiley et al., arXiv 1905.05894.

    >>> "%.4g %.8f" % scale_hyperparameters(0.1, 0.9, reference=256, size=32)
    '0.001636 0.98691628'
    """
    if reference < 1 or size < 1:
        raise ValueError(f"update sizes are samples an update, at least 1: reference={reference}, size={size}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), but is {momentum}")
    ratio = size / reference
    scaled = momentum**ratio
    return rate * ratio * (1 - scaled) / (1 - momentum), scaled


def require_momentum_sgd(optimizer: Any, method: str, alternative: str, *, positive: bool = True) -> None:
    """Raise a ValueError unless the optimizer is torch's SGD with plain momentum (`positive`: above 0)."""
    found = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(f"{method} is written for momentum SGD, but the optimizer is {found}; use {alternative}")
    for group in optimizer.param_groups:
        if group["nesterov"] or group["dampening"]:
            name = "nesterov" if group["nesterov"] else "dampening"
            raise ValueError(
                f"{method} needs SGD's plain momentum, but {name}={group[name]}; set it to 0 or use {alternative}"
            )
        if positive and not group["momentum"]:
            raise ValueError(f"{method} predicts from the velocity, but momentum=0; set momentum or use {alternative}")


def velocity(optimizer: OptimizerLike, weights: Weights) -> list[Tensor | None]:
    """v of each weight: torch's own momentum buffer, None before the first step (v = 0)."""
    state = optimizer.state
    return [state[w].get("momentum_buffer") for w in weights]


def spike(momentum: float, horizon: float) -> tuple[float, float]:
    """Spike compensation's (a, b) for a gradient that comes `horizon` updates late."""
    a = momentum**horizon
    return a, (1 - a) / (1 - momentum)


def spiked_step(
    optimizer: OptimizerLike, weights: Weights, coefficients: Callable[[int, float], tuple[float, float]]
) -> None:
    """One step of momentum SGD with w ← w − η·(a·v + b·g).

    coefficients: (number of the weight, m) -> (a, b). The plain step is taken exactly as torch.optim.SGD takes it, and
    then corrected by η·(1 − a)·v − η·b·g, so that where a = 1 and b = 0 the bits are torch's.
    """
    number = {w: n for n, w in enumerate(weights)}
    for group in optimizer.param_groups:
        params = [w for w in group["params"] if w.grad is not None]
        if not params:
            continue
        rate, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        grads = [w.grad for w in params]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        if decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        steps = _velocities(optimizer, params, grads, momentum) if momentum else grads
        torch._foreach_add_(params, steps, alpha=-rate)
        spikes = [coefficients(number[w], momentum) for w in params]
        add_scaled(params, [rate * (1 - a) for a, _ in spikes], steps)
        add_scaled(params, [-rate * b for _, b in spikes], grads)


def _velocities(optimizer: OptimizerLike, params: Weights, grads: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """v ← m·v + g in torch's own momentum buffers; the first v is g."""
    found, old, fresh = [], [], []
    for w, g in zip(params, grads, strict=True):
        state = optimizer.state[w]
        v = state.get("momentum_buffer")
        if v is None:
            v = state["momentum_buffer"] = torch.clone(g).detach()
        else:
            old.append(v)
            fresh.append(g)
        found.append(v)
    if old:
        torch._foreach_mul_(old, momentum)
        torch._foreach_add_(old, fresh, alpha=1)
    return found
