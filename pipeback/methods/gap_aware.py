"""Gap-aware gradients (GA).

    π = 1 + |w_t − w_F| / C        g' = g/π,  the weight decay alike        w ← step(w, g')
    momentum SGD:         C = η_max·(√(r/(1 − Γᵗ)) + ε)        r ← Γ·r + (1 − Γ)·v²
    other optimizers:     C = √(r/(1 − Γᵗ)) + ε                r ← Γ·r + (1 − Γ)·(w_t − w_{t+1})²
    weight decay λ:       in the gradient: g' ← g' + λ·w·(1 − π)/π;   decoupled: w ← w·(1 − η·λ·(1 − π)/π) beforehand
    Γ = 0.999,  ε = 1e-8

The gradient of the weights w_F on which the forward ran is divided by the gap that has opened since, counted in
average steps, entry by entry. C is the size of such a step, t the number of the stage's updates, η_max its largest rate
so far; π = 1 at the first update, and where η_max = 0. The forward F runs on w_t, the backward B on w_F.

Barkai, Hakimi and Schuster, ICLR 2020 (arXiv 1909.10802), section 4, and the code of FTPipe (ATC 2021), which also has
the form for Adam; which Γ they use was not looked up. Any optimizer; with weight decay one of torch's elementwise ones.
Weight copies: D + 2, one per version in flight, D the stage's delay in updates; r is one more copy as state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.columns import Number, column, largest, positive
from pipeback.methods.gradients import decoupled, gradients, replaced
from pipeback.methods.option_checks import check_share, require_dense, require_real
from pipeback.schedules.programs import flowing

TINY = 1e-8
DECAYS = {  # optimizers of which it is known how they decay weights
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD")
}


@dataclass(repr=False)
class GapAware(Method):
    """decay: Γ. slack: 1 for the delays of asynchronous 1F1B."""

    decay: float = 0.999
    slack: int = 1

    def __post_init__(self) -> None:
        check_share("gap_aware", "decay", self.decay)
        self.schedule = flowing(self.slack)
        self.copies = "stash"
        self.needs_used = True
        self.state_copies = 1
        self.takes_rows = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_real(optimizer, "gap_aware")
        require_dense(optimizer, "gap_aware")
        if type(optimizer) not in DECAYS and any(group.get("weight_decay") for group in optimizer.param_groups):
            raise ValueError(
                f"gap_aware divides the weight decay, too, but how {type(optimizer).__name__} decays weights is not "
                'known; set weight_decay=0, or use method="dc_asgd"'
            )

    def init(self, weights: Weights) -> State:
        return {"updates": 0, "squares": [torch.zeros_like(w) for w in weights]}

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        if not positive(when.delay):
            optimizer.step()
            return state
        place = {id(w): n for n, w in enumerate(weights)}
        of = {place[id(w)]: number for number, group in enumerate(optimizer.param_groups) for w in group["params"]}
        groups = optimizer.param_groups
        state = {**state, **_largest(state, groups), "updates": state["updates"] + 1}
        numbers, given = gradients(weights)
        numbers, given = [n for n in numbers if n in of], [g for n, g in zip(numbers, given, strict=True) if n in of]
        before = {n: weights[n].detach().clone() for n in numbers if not _velocity(groups[of[n]])}
        grads = given
        if when.rows or state["updates"] > 1:
            assert when.used is not None
            pairs = zip(numbers, given, strict=True)
            gaps = {n: torch.sub(weights[n], when.used[n]).abs_() for n in numbers}
            grads = [self._closed(weights[n], g, gaps[n], groups[of[n]], state, of[n], n) for n, g in pairs]
        with replaced(weights, numbers, grads):
            optimizer.step()
        for n in numbers:
            moved = before[n].sub_(weights[n]) if n in before else optimizer.state[weights[n]]["momentum_buffer"]
            state["squares"][n].mul_(self.decay).addcmul_(moved, moved, value=1 - self.decay)
        return state

    def correction(self, when: When, state: State) -> Correction:
        return Correction(used=True, own=True)

    def _closed(
        self, w: Tensor, g: Tensor, gap: Tensor, group: dict[str, Any], state: State, number: int, n: int
    ) -> Tensor:
        """The gradient of weight n, divided by the gap; a decoupled decay changes the weight already here."""
        known = 1 - self.decay ** (state["updates"] - 1)
        size = state[f"largest{number}"] if _velocity(group) else 1.0
        steps = known * size
        if not isinstance(steps, Tensor):
            if not steps:
                return g
            stays = None
        else:  # π = 1 in some rows
            stays = column(steps == 0, w).bool()
            known = torch.where(steps == 0, 1, known)
        step = (state["squares"][n] / column(known, w)).sqrt_().add_(TINY)
        if _velocity(group):
            step.mul_(column(size, w))
        gap = gap.div_(step)
        divisor = (gap if stays is None else gap.masked_fill_(stays, 0)).add_(1)
        found, decay = g / divisor, group.get("weight_decay") or 0
        if decay:
            share = (1 - divisor).div_(divisor)
            if decoupled(group):
                w.addcmul_(w, share.mul_(column(_rate(group), w)), value=-decay)
            else:
                found.addcmul_(w, share, value=-decay if group.get("maximize") else decay)
        return found


def _velocity(group: dict[str, Any]) -> bool:
    """Whether a group is one of momentum SGD."""
    return "dampening" in group and bool(group["momentum"])


def _largest(state: State, groups: list[dict[str, Any]]) -> State:
    """The largest rate of every group so far."""
    return {f"largest{n}": largest(state.get(f"largest{n}", 0.0), _rate(group)) for n, group in enumerate(groups)}


def _rate(group: dict[str, Any]) -> Number:
    """The rate of a group, a vector where its weights are rows."""
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) and rate.dim() else float(rate)
