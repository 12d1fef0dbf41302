"""Decayed prediction (MSNAG): the steps that momentum has already committed the optimizer to.

    F on ŵ = D steps of the optimizer from w_t, with gradients of 0        B on w_t        w ← step(w, g)
    SGD:            v ← m·v + (1 − τ)·λ·ŵ        ŵ ← ŵ − η·v
                    without decay  ŵ = w_t − η·v_t·(m − m^{D+1})/(1 − m)
    Adam, AdamW:    ŵ ← (1 − η·λ)·ŵ (AdamW)      ŵ ← ŵ − η·β₁ʲ·m / (1 − β₁^{t+j}) / (√(q/(1 − β₂^{t+j})) + ε)
                    for j = 1 … D

Unlike linear prediction (`lwp`, `pipeoptim`), which goes as far as D full steps, it is bounded by m/(1 − m) of them,
however long the delay D of a stage is. η is the rate of the stage's last update, τ the dampening. A weight decay that
is part of Adam's gradients is left out. The forward F runs on ŵ; the backward B on w_t, or with `stash` on what F used.

Hakimi et al., arXiv 1907.11612 (DANA's look-ahead), and the code of FTPipe (ATC 2021), which also looks ahead in the
schedule of the rate. SGD, Adam, AdamW. Weight copies: 1 and a scratch buffer; with `stash` 1, and one more per
micro-batch in flight. ŵ − w_t is one more copy as state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.adam import is_adam, moments
from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.columns import Number, column, positive
from pipeback.methods.few_quotients import fewer_quotients
from pipeback.methods.gradients import decoupled
from pipeback.methods.momentum import LWP_OF_WEIGHTS
from pipeback.methods.option_checks import require_real
from pipeback.schedules.programs import flowing
from pipeback.schedules.timeline import in_flight


@dataclass(repr=False)
class DecayedPrediction(Method):
    """stash: whether B runs on what F used. slack: 2 for PB's delays."""

    stash: bool = False
    slack: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.stash, bool):
            raise ValueError(f"msnag: stash must be True or False, but is {self.stash!r}")
        self.schedule = flowing(self.slack)
        self.copies = "stash" if self.stash else "scratch"
        self.state_copies = 1
        self.merges = self.reads_moments = self.takes_rows = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        if not isinstance(optimizer, torch.optim.SGD) and not is_adam(optimizer):
            raise ValueError(
                "msnag makes steps of SGD, Adam or AdamW without a gradient, but the optimizer is "
                f"{type(optimizer).__name__}{' with amsgrad' if isinstance(optimizer, torch.optim.Adam) else ''}; use "
                f"{LWP_OF_WEIGHTS}"
            )
        if is_adam(optimizer):
            require_real(optimizer, "msnag")

    def held(self, stage: int, stages: int) -> int:
        if not self.stash:
            return 2
        return 1 + in_flight(self.schedule, stages)[stage] if self.delays(stages)[stage] else 1

    def init(self, weights: Weights) -> State:
        return {"ahead": [torch.zeros_like(w) for w in weights]}

    def forward_weights(self, weights: Weights, state: State, when: When) -> Chosen:
        if self.stash and not when.delay:
            return weights
        return Shift(weights, [float(D > 0) for D in when.delays], state["ahead"])

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        if not self.stash:
            return weights
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        optimizer.step()
        place = {id(w): n for n, w in enumerate(weights)}
        for group in optimizer.param_groups:
            numbers = [n for w in group["params"] if positive(when.delays[n := place[id(w)]])]
            if not numbers:
                continue
            some = [weights[n] for n in numbers]
            ahead, delays = [state["ahead"][n] for n in numbers], [when.delays[n] for n in numbers]
            if "betas" in group:
                _ahead_of_adam(optimizer, group, some, ahead, delays)
            else:
                for w, x, D in zip(some, ahead, delays, strict=True):
                    _ahead_of_sgd(optimizer.state.get(w, {}).get("momentum_buffer"), group, w, x, D)
        return state

    def correction(self, when: When, state: State) -> Correction:
        return Correction([float(D > 0) for D in when.delays], used=self.stash, along="ahead", own=True)


def _ahead_of_sgd(v: Tensor | None, group: dict[str, Any], w: Tensor, into: Tensor, D: Number) -> None:
    """ŵ − w of one weight."""
    options = group["momentum"], group["weight_decay"], group["dampening"], group["nesterov"]
    rates, several = group["lr"], isinstance(D, Tensor)
    if several:
        pairs = [_powers(rate, *options, n) for rate, n in zip(rates.tolist(), D.flatten().tolist(), strict=True)]
        by_weight, by_velocity = (
            column(torch.tensor(some, dtype=torch.float64, device=w.device), w) for some in zip(*pairs, strict=True)
        )
    else:
        by_weight, by_velocity = _powers(float(rates), *options, D)
    if v is None:
        into.zero_()
    else:
        torch.mul(v, by_velocity, out=into)
    if several and group["weight_decay"]:
        into.addcmul_(w, by_weight)
    elif not several and by_weight:
        into.add_(w, alpha=by_weight)


@lru_cache(maxsize=1024)
def _powers(
    rate: float, momentum: float, decay: float, dampening: float, nesterov: bool, D: float
) -> tuple[float, float]:
    """How ŵ − w depends on w and on v, to both of which D steps are linear."""
    found = []
    for w, v in ((1.0, 0.0), (0.0, 1.0)):
        moved = 0.0
        for _ in range(int(D)):
            g = decay * (w + moved)
            v = momentum * v + (1 - dampening) * g if momentum else g
            moved -= rate * (g + momentum * v if nesterov else v)
        found.append(moved)
    return found[0], found[1]


def _ahead_of_adam(
    optimizer: OptimizerLike, group: dict[str, Any], weights: Weights, into: Weights, delays: list[Number]
) -> None:
    """ŵ − w of the weights of a group, with the sums of `_of_rows`."""
    if any(isinstance(D, Tensor) for D in delays):
        _of_rows(optimizer, group, weights, into, delays)
        return
    rate, of = float(group["lr"]), moments(optimizer, group, weights)
    torch._foreach_zero_(into)
    if group["weight_decay"] and decoupled(group):
        kept = [(1 - rate * group["weight_decay"]) ** D - 1 for D in delays]
        torch._foreach_add_(into, torch._foreach_mul(list(weights), kept))
    known, alike = {id(w): n for n, w in enumerate(weights)}, dict[tuple[Any, ...], list[int]]()
    for k, (w, t) in enumerate(zip(of.weights, of.steps, strict=True)):
        alike.setdefault((delays[known[id(w)]], float(t), w.dtype), []).append(k)
    for (D, t, kind), some in alike.items():
        eta, far, done = (torch.tensor([number], dtype=torch.float64, device="cpu") for number in (rate, D, t))
        roots, first = torch._foreach_sqrt([of.second[k] for k in some]), [of.first[k] for k in some]
        places = [into[known[id(of.weights[k])]] for k in some]
        for size, little in zip(*(x.flatten().tolist() for x in _quotients(group, eta, far, done, kind)), strict=True):
            torch._foreach_addcdiv_(places, first, torch._foreach_add(roots, little), size)


def _quotients(group: dict[str, Any], rate: Tensor, far: Tensor, t: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """s and ε of `_of_rows`, of fewer quotients (K, rows) with the same sum. far: D, and t, of every row."""
    beta1, beta2 = map(float, group["betas"])
    j = torch.arange(1, int(far.max()) + 1, dtype=torch.float64, device=far.device)[:, None]
    roots = (1 - beta2 ** (t + j)).sqrt()
    sizes = -rate * beta1**j * roots / (1 - beta1 ** (t + j))
    if group["weight_decay"] and decoupled(group):
        sizes = sizes * (1 - rate * group["weight_decay"]) ** (far - j)
    return fewer_quotients(torch.where(j <= far, sizes, 0), group["eps"] * roots, kind)


def _of_rows(
    optimizer: OptimizerLike, group: dict[str, Any], weights: Weights, into: Weights, delays: list[Tensor]
) -> None:
    """The same for rows, of which the first ones have the longest delays; step j is made by those with j ≤ D.

        ŵ − w = m·y + (left^D − 1)·w        y = Σ_{j=1…D} left^{D−j}·s_j/(√q + ε_j)        left = 1 − η·λ
        s_j = −η·β₁ʲ·√(1 − β₂^{t+j})/(1 − β₁^{t+j})        ε_j = ε·√(1 − β₂^{t+j})

    What steps have in common, m, stands before the sum, which `fewer_quotients` makes of a few of them. Vectors that
    take equal steps are one, since a step of a short one takes longer to call than to do.
    """
    of = moments(optimizer, group, weights)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for n, (w, D, t) in enumerate(zip(weights, delays, of.counts, strict=True)):
        steps = *D.flatten().tolist(), *t.flatten().tolist(), *group["lr"].flatten().tolist()
        alike.setdefault((w.dtype, *steps, w.dim() > 2 and n), []).append(n)
    for numbers in alike.values():
        found = _summed([of.second[n] for n in numbers], group, delays[numbers[0]], of.counts[numbers[0]])
        for n, y in zip(numbers, found, strict=True):
            torch.mul(y, of.first[n], out=into[n])
            if group["weight_decay"] and decoupled(group):
                far = delays[n].flatten().double()
                kept = (1 - group["lr"].double() * group["weight_decay"]) ** far - 1
                into[n].addcmul_(weights[n], column(kept, weights[n]))


def _summed(second: list[Tensor], group: dict[str, Any], D: Tensor, t: Tensor) -> Sequence[Tensor]:
    """y of weights that take equal steps."""
    lengths = [q[0].numel() for q in second]
    root = (second[0] if len(second) == 1 else torch.cat([q.reshape(len(q), -1) for q in second], 1)).sqrt()
    far = D.flatten().double()
    sizes, tiny = _quotients(group, group["lr"].double().expand_as(far), far, t, root.dtype)
    ends = (torch.arange(1, len(far) + 1, device=far.device) * (sizes != 0)).amax(1)  # of the rows that make a step
    y, below = torch.zeros_like(root), torch.empty_like(root)
    # as columns at once: to make them takes as long as the arithmetic of a small weight
    steps = [some.to(root.dtype).view(*some.shape, *[1] * (root.dim() - 1)).unbind() for some in (sizes, tiny)]
    for k, size, little in zip(ends.tolist(), *steps, strict=True):
        y[:k].addcdiv_(size[:k], torch.add(root[:k], little[:k], out=below[:k]))
    if len(second) == 1:
        return [y]
    return [some.view(q.shape) for some, q in zip(y.split(lengths, 1), second, strict=True)]
