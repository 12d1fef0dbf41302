"""Adam in parts: its moments, and a step with spike compensation.

    w ← (1 − η·λ)·w  (AdamW)       g ← ±∇f + λ·w  (Adam)        t ← t + 1
    m ← β₁·m + (1 − β₁)·g          q ← β₂·q + (1 − β₂)·g²
    w ← w − η·(a·m̂ + b·g) / (√q̂ + ε)        m̂ = m/(1 − β₁ᵗ),  q̂ = q/(1 − β₂ᵗ)

torch's own step has a = 1 and b = 0. In its state, m is `exp_avg`, q `exp_avg_sq` and t `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.methods.base import OptimizerLike
from pipeback.methods.columns import Number, column, positive
from pipeback.methods.gradients import decoupled, entering, gradients
from pipeback.methods.momentum import LWP_OF_WEIGHTS
from pipeback.private import fused_adam

Group = dict[str, Any]


def is_adam(optimizer: Any) -> bool:
    """Whether an optimizer is torch's Adam or AdamW, whose second moment is that of the equations."""
    return isinstance(optimizer, torch.optim.Adam) and not any(group["amsgrad"] for group in optimizer.param_groups)


def require_adam(optimizer: Any, method: str, alternative: str = LWP_OF_WEIGHTS) -> None:
    """Raise a ValueError unless the optimizer is torch's Adam or AdamW, without amsgrad."""
    if is_adam(optimizer):
        return
    found = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adam):
        raise ValueError(
            f"{method} needs Adam's own second moment, but amsgrad=True; set it to False or use {alternative}"
        )
    raise ValueError(f"{method} is written for Adam and AdamW, but the optimizer is {found}; use {alternative}")


def adam_spike(beta: float, horizon: Number) -> tuple[Number, Number]:
    """The coefficients (a, b) of spike compensation for a gradient that comes `horizon` updates late.

    m is an average where the velocity of `momentum.spike` is a sum, so that a + b = 1.

    >>> adam_spike(0.9, 0), adam_spike(0.5, 1)
    ((1.0, 0.0), (0.5, 0.5))
    """
    a = beta**horizon if isinstance(horizon, Tensor) else float(beta**horizon)
    return a, 1 - a


class Moments(NamedTuple):
    """The state of some weights of a group, one entry per weight."""

    weights: list[Tensor]
    first: list[Tensor]  # m
    second: list[Tensor]  # q
    steps: list[Tensor]  # t
    counts: list[Number]  # t
    first_corrections: list[Number]  # 1 − β₁ᵗ
    second_corrections: list[Number]  # 1 − β₂ᵗ

    def roots(self, tiny: float) -> list[Tensor]:
        """√q̂ + ε, with the bits of torch's step."""
        found = torch._foreach_sqrt(self.second)
        torch._foreach_div_(found, [c**0.5 for c in self.second_corrections])
        torch._foreach_add_(found, tiny)
        return list(found)


def moments(optimizer: OptimizerLike, group: Group, weights: Sequence[Tensor]) -> Moments:
    """m, q and t of those of these weights of a group that have stepped."""
    state, (beta1, beta2) = optimizer.state, map(float, group["betas"])
    there = [w for w in weights if "exp_avg" in state.get(w, ())]
    steps = [state[w]["step"] for w in there]
    # of rows, where the weights are; torch keeps the numbers in host memory
    counts = [t.to(w.device, torch.float64) if t.dim() else float(t) for t, w in zip(steps, there, strict=True)]
    first, second = ([state[w][key] for w in there] for key in ("exp_avg", "exp_avg_sq"))
    corrections = ([column(1 - beta**t, w) for t, w in zip(counts, there, strict=True)] for beta in (beta1, beta2))
    return Moments(there, first, second, steps, counts, *corrections)


def adam_step(
    optimizer: OptimizerLike, horizons: Mapping[int, Number], rates: Mapping[int, Number] | None = None
) -> None:
    """One step of Adam or AdamW of the weights in `horizons`, which has T of spike compensation by their identity.

    Where T = 0, the bits are those of torch's step. rates: η by the identity of a weight; None: that of its group.
    """
    with torch.no_grad():
        for group in optimizer.param_groups:
            params = [w for w in group["params"] if w.grad is not None and id(w) in horizons]
            for w in params:
                adam_state(optimizer, w, group)["step"].add_(1)
            prompt, late = ([w for w in params if positive(horizons[id(w)]) == is_late] for is_late in (False, True))
            if group.get("fused") and prompt and rates is None:
                _fused(moments(optimizer, group, prompt), group)
                prompt = []
            for some in (prompt, late):
                if some:
                    every = [float(group["lr"]) if rates is None else rates[id(w)] for w in some]
                    _move(moments(optimizer, group, some), group, horizons, every)


def adam_state(optimizer: OptimizerLike, w: Tensor, group: Group) -> dict[str, Any]:
    """The state of a weight, which begins as torch begins it."""
    entry: dict[str, Any] = optimizer.state[w]
    if "exp_avg" not in entry:
        kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        where = w.device if group.get("capturable") or group.get("fused") else None
        entry["step"] = torch.zeros((), dtype=kind, device=where)
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = torch.zeros_like(w, memory_format=torch.preserve_format)
    return entry


def _move(of: Moments, group: Group, horizons: Mapping[int, Number], rates: Sequence[Number]) -> None:
    """Step weights all of which come late, or none of which does."""
    (beta1, beta2), decay = map(float, group["betas"]), group["weight_decay"]
    if decay and decoupled(group):
        torch._foreach_mul_(of.weights, [1 - rate * decay for rate in rates])
    grads = [entering(w, group) for w in of.weights]
    torch._foreach_lerp_(of.first, grads, 1 - beta1)
    torch._foreach_mul_(of.second, beta2)
    torch._foreach_addcmul_(of.second, grads, grads, 1 - beta2)
    along, sizes = of.first, [-rate / c for rate, c in zip(rates, of.first_corrections, strict=True)]
    if positive(horizons[id(of.weights[0])]):
        spikes = [adam_spike(beta1, horizons[id(w)]) for w in of.weights]
        along = list(
            torch._foreach_mul(of.first, [a / c for (a, _), c in zip(spikes, of.first_corrections, strict=True)])
        )
        torch._foreach_add_(along, torch._foreach_mul(grads, [b for _, b in spikes]))
        sizes = [-rate for rate in rates]
    if isinstance(sizes[0], Tensor):
        along, sizes = list(torch._foreach_mul(along, sizes)), [1.0] * len(along)
    torch._foreach_addcdiv_(of.weights, along, of.roots(group["eps"]), sizes)


def _fused(of: Moments, group: Group) -> None:
    """torch's fused step, whose kernel ignores strides."""
    _, grads = gradients(of.weights)
    grads = [
        g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for w, g in zip(of.weights, grads, strict=True)
    ]
    fused_adam(decoupled=decoupled(group))(
        of.weights, grads, of.first, of.second, [], of.steps, lr=float(group["lr"]), beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]), weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
        maximize=group["maximize"],
    )  # fmt: skip
