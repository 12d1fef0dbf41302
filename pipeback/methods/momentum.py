"""Momentum SGD in parts: its velocity, a step with spike compensation, and the scaling of its hyper-parameters.

g ← ±∇f + λ·w        v ← m·v + g        w ← w − η·(a·v + b·g)        (torch.optim.SGD: a = 1, b = 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor

from pipeback import private
from pipeback.methods.base import OptimizerLike
from pipeback.tensors.fused_steps import fused_sgd_step, laid_grads
from pipeback.tensors.weight_list import (
    DECAYED,
    GRADIENTS,
    VELOCITIES,
    WeightList,
    Weights,
    add_scaled,
    by_number,
    chosen,
    whole,
)

LWP_OF_WEIGHTS = 'method=pipeback.methods.create("lwp", form="weight")'  # takes any optimizer


def scale_hyperparameters(rate: float, momentum: float, reference: int, size: int) -> tuple[float, float]:
    """Rate and momentum for another update size, with the same decay time and the same total step per sample.

        m = m_r^(N/N_r)          η = η_r · (N/N_r) · (1 − m)/(1 − m_r)

    rate, momentum: η_r and m_r, tuned at `reference` = N_r samples per update; size: N, the new update size.
    Returns (η, m). Kosson et al., arXiv 2003.11666; Chiley et al., arXiv 1905.05894.

    >>> "%.5g %.8f" % scale_hyperparameters(0.1, 0.9, reference=256, size=32)
    '0.0016355 0.98691628'
    """
    if reference < 1 or size < 1:
        raise ValueError(f"update sizes are samples per update, at least 1: reference={reference}, size={size}")
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


def check_horizon(method: str, horizon: Any) -> None:
    """Raise a ValueError unless the horizon is None or a number of updates."""
    if horizon is not None and not (isinstance(horizon, (int, float)) and 0 <= horizon < float("inf")):
        raise ValueError(f"{method}: horizon is a number of updates, 0 or more, or None for D; not {horizon!r}")


def velocity(optimizer: OptimizerLike, weights: Weights) -> list[Tensor | None]:
    """v of each weight: torch's own momentum buffer, or None before the first step (v = 0).

    Once all weights have stepped, every call returns the same list.
    """
    state = optimizer.state
    if isinstance(weights, WeightList) and weights.velocities is not None:
        return weights.velocities  # type: ignore[return-value]
    found = [state[w].get("momentum_buffer") for w in weights]
    if isinstance(weights, WeightList) and all(v is not None for v in found):
        beside = [] if weights.strip is None else weights.room(VELOCITIES)
        laid = all(v is place for v, place in zip(found, beside, strict=False)) and len(beside)
        weights.velocities = beside if laid else found
        return weights.velocities  # type: ignore[return-value]
    return found


def lay_velocities(optimizer: torch.optim.Optimizer, weights: WeightList) -> None:
    """Lay torch's momentum buffers one after the other, as the weights lie; other buffers are copied there first.

    Another optimizer may keep something else under their name, which stays as it is.
    """
    buffers = [optimizer.state.get(w, {}).get("momentum_buffer") for w in weights]
    if weights.strip is None or not all(map(_buffers, buffers, weights)):
        return
    weights.strip.bring_back(VELOCITIES, weights.first, len(weights))
    for w, v, place in zip(weights, buffers, weights.room(VELOCITIES), strict=True):
        if v is not place:
            optimizer.state[w]["momentum_buffer"] = place.copy_(v)


def _buffers(v: Any, w: Tensor) -> bool:
    """Whether this is a momentum buffer of such a weight."""
    return isinstance(v, Tensor) and v.layout is torch.strided and v.shape == w.shape and v.dtype == w.dtype


def spike(momentum: float, horizon: float) -> tuple[float, float]:
    """The coefficients (a, b) of spike compensation for a gradient that comes `horizon` updates late.

    >>> spike(0.9, 0), spike(0.9, 1)
    ((1.0, 0.0), (0.9, 1.0))
    >>> spike(1.0, 3)
    (1.0, 3)
    """
    a = momentum**horizon
    return a, horizon if momentum == 1 else (1 - a) / (1 - momentum)  # its limit


def plain_sgd(group: dict[str, Any]) -> bool:
    """Whether `sgd_step` can make this group's step: it knows SGD without torch's further variants."""
    odd = ("nesterov", "dampening", "differentiable", "fused")
    return not any(group.get(name) for name in odd) and group["foreach"] is not False


def fused_sgd(group: dict[str, Any]) -> bool:
    """Whether `fused_step` can make this group's step: momentum SGD by torch's fused kernel, without its variants."""
    odd = any(group.get(name) for name in ("nesterov", "dampening", "differentiable"))
    kinds = {(w.dtype, w.device) for w in group["params"]}  # the kernel takes lists of one
    known = not odd and not isinstance(group["lr"], Tensor) and len(kinds) == 1
    return known and bool(group.get("fused")) and bool(group["momentum"])


def fused_step(optimizer: OptimizerLike) -> bool:
    """Do one fused step of momentum SGD over all groups, with torch.optim.SGD's bits, and return whether it was done.

    Nothing is done where a weight has no velocity yet, or a gradient that is missing or sparse: torch's own step knows
    these. It also looks at every weight anew, which takes longer than the kernel where weights are small.
    """
    ready = []
    for group in optimizer.param_groups:
        weights, velocities = group["params"], velocity(optimizer, group["params"])
        grads = laid_grads(weights)
        if grads is None or any(v is None for v in velocities):
            return False
        ready.append((weights, grads, velocities, group))
    kernel = private.fused_sgd()
    for weights, grads, velocities, group in ready:
        kernel(
            weights, grads, velocities, weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
            dampening=0.0, nesterov=False, maximize=group["maximize"], is_first_step=False,
        )  # fmt: skip
    return True


def sgd_step(optimizer: OptimizerLike, weights: Weights | None = None, horizons: Sequence[float] = ()) -> None:
    """One step of momentum SGD over all groups, with torch.optim.SGD's bits.

    horizons: T of spike compensation, one number per weight: w ← w − η·(a·v + b·g). Where T = 0, the bits are still
    torch's, and those of its fused step if the group asks for it. "rates" of a group: one per weight, instead of its
    own (`rates.divided_rates`).
    """
    late = (
        dict(zip(weights, horizons, strict=True)) if weights is not None and len(optimizer.param_groups) > 1 else None
    )
    for group in optimizer.param_groups:
        params = group["params"]
        grads: Any = [w.grad for w in params]
        mine = horizons if late is None else tuple(late[w] for w in params)
        rates: Sequence[float] = group.get("rates") or ()
        if [n for n, g in enumerate(grads) if g is None]:
            there = [n for n, g in enumerate(grads) if g is not None]
            params, grads = WeightList(params[n] for n in there), [grads[n] for n in there]
            mine = tuple(mine[n] for n in there) if weights is not None else ()
            rates = [rates[n] for n in there] if rates else ()
        if group.get("fused"):
            spiked = [n for n, T in enumerate(mine) if T]
            fused_sgd_step(optimizer.state, [w for n, w in enumerate(params) if n not in spiked], group)
            if not spiked:
                continue
            params, grads, mine = chosen(params, spiked), chosen(grads, spiked), tuple(T for T in mine if T)
        if not params:
            continue
        rate, momentum = float(group["lr"]), group["momentum"]
        with torch.no_grad():
            grads = _gradients(params, grads, group)
            steps: Any = _velocities(optimizer, params, grads, momentum) if momentum else grads
            if rates:
                _each_at(rates, params, steps, grads, momentum, mine)
            elif not any(mine):
                torch._foreach_add_(*whole(params, steps), alpha=-rate)
            else:
                bundle = params if isinstance(params, WeightList) else WeightList(params)
                _spiked(bundle, steps, grads, rate, momentum, tuple(mine))


def _gradients(params: Weights, grads: Any, group: dict[str, Any]) -> Any:
    """g of every weight; in one piece of memory if the weights and their gradients lie so."""
    beside = params.room(GRADIENTS) if isinstance(params, WeightList) and params.strip is not None else WeightList()
    laid = len(beside) > 0 and all(map(is_, grads, beside))
    grads = beside if laid else grads
    negated, decay = group["maximize"], group["weight_decay"]
    if not laid:
        grads = torch._foreach_neg(grads) if negated else grads
        return torch._foreach_add(grads, params, alpha=decay) if decay else grads
    if not negated and not decay:
        return grads
    made = params.room(DECAYED)  # type: ignore[attr-defined]
    (out,), (g,), (w,) = whole(made, grads, params)
    if negated:
        g = torch.neg(g, out=out)
    if decay:
        torch.add(g, w, alpha=decay, out=out)
    return made


def _each_at(
    rates: Sequence[float],
    params: Weights,
    steps: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: float,
    horizons: Sequence[float],
) -> None:
    """Step each weight at its own rate."""
    if not any(horizons):
        numbers, (weights, along) = by_number(rates, params, steps)
        for rate, w, v in zip(numbers, weights, along, strict=True):
            w.add_(v, alpha=-rate)
        return
    for rate in dict.fromkeys(rates):
        some = [n for n, other in enumerate(rates) if other == rate]
        late, along = tuple([horizons[n] for n in some]), [steps[n] for n in some]
        bundle = WeightList(params[n] for n in some)
        if any(late):
            _spiked(bundle, along, [grads[n] for n in some], rate, momentum, late)
        else:
            torch._foreach_add_(bundle, along, alpha=-rate)


def _spiked(
    params: WeightList,
    steps: Sequence[Tensor],
    grads: Sequence[Tensor],
    rate: float,
    momentum: float,
    horizons: tuple[float, ...],
) -> None:
    prompt, late, by_velocity, by_gradient = _spikes(rate, momentum, horizons)
    for n in prompt:
        params[n].add_(steps[n], alpha=-rate)
    if prompt:
        params, steps, grads = params.only(late), chosen(steps, late), chosen(grads, late)
    add_scaled(params, by_velocity, steps)
    add_scaled(params, by_gradient, grads)


@lru_cache(maxsize=256)
def _spikes(
    rate: float, momentum: float, horizons: tuple[float, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], list[float], list[float]]:
    """The weights whose step is torch's own, the others, and the coefficients of these: −η·a of v and −η·b of g."""
    prompt = tuple(n for n, T in enumerate(horizons) if not T)
    late = tuple(n for n, T in enumerate(horizons) if T)
    pairs = [spike(momentum, horizons[n]) for n in late]
    return prompt, late, [-rate * a for a, _ in pairs], [-rate * b for _, b in pairs]


def _velocities(optimizer: OptimizerLike, params: Weights, grads: Sequence[Any], momentum: float) -> list[Tensor]:
    """v ← m·v + g in torch's own momentum buffers; the first v is g."""
    found = cast(list[Any], velocity(optimizer, params))
    fresh = [n for n, v in enumerate(found) if v is None]
    if not fresh:
        v, g = whole(found, grads)
        torch._foreach_mul_(v, cast(Any, params.factor(momentum) if isinstance(params, WeightList) else momentum))
        torch._foreach_add_(v, list(g), alpha=1)
        return found
    old = [n for n, v in enumerate(found) if v is not None]
    if old:
        torch._foreach_mul_([found[n] for n in old], momentum)
        torch._foreach_add_([found[n] for n in old], [grads[n] for n in old], alpha=1)
    for n in fresh:
        found[n] = optimizer.state[params[n]]["momentum_buffer"] = torch.clone(grads[n]).detach()
    return found
