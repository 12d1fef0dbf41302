"""PipeMare: asynchronous training with rescheduled rates and a discrepancy correction.

    T1   η_k = η / τ^p,  p = 1 − min(k/K, 1)        τ = max(1, (micro-batches in flight)/N)
    T2   B on w_t − D·δ,  δ ← γ·δ + (1 − γ)·(w_{t+1} − w_t),  γ = d^(1/D)
    T3   the first `warmup` micro-batches run in flushes of N, without T1 and T2; δ is tracked meanwhile

| symbol | argument      |                                                                       |
| K      | anneal        | updates until the rate is the base rate, counted from the end of T3   |
| d      | decay         | what is left of a displacement in δ after D updates, in (0, 1)        |
| N      | micro_batches | micro-batches per update                                               |

The forward F runs on w_t, the backward B on a correction of it; D is the stage's delay in updates. Yang et al., arXiv
1910.05124 (MLSys 2021), sections 3.1 to 3.3; constants as commonly described. Left out: the recomputing variant. Any
optimizer. Weight copies: 1, with T2 a scratch buffer too; δ is one more copy as state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.rates import each_divided
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import Flowing, flowing
from pipeback.schedules.timeline import in_flight
from pipeback.schedules.warm_up import WarmUp
from pipeback.tensors.weight_list import by_number, moved, noted


@dataclass(repr=False)
class PipeMare(Method):
    """anneal: K, required with T1. t1, t2: switch each off. warmup: micro-batches of T3. slack: 2 as published."""

    anneal: int | None = None
    t1: bool = True
    t2: bool = True
    warmup: int = 0
    micro_batches: int = 1
    decay: float = 0.135
    slack: int = 2

    def __post_init__(self) -> None:
        if self.t1 and (not isinstance(self.anneal, int) or self.anneal < 1):
            raise ValueError(
                "pipemare: anneal= is the number of updates until the smaller rates of early stages have grown to the "
                f"full rate, at least 1, but is {self.anneal!r}; a quarter of the first constant-rate phase is common, "
                "say anneal=1000, and t1=False trains at the full rate from the start"
            )
        if not 0 < self.decay < 1:
            raise ValueError(f"pipemare: decay must lie between 0 and 1, but is {self.decay!r}")
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"pipemare: warmup counts micro-batches, at least 0, but is {self.warmup!r}")
        self.schedule = flowing(self.slack, every=self.micro_batches)
        self.copies = "scratch" if self.t2 else "live"
        self.state_copies = int(self.t2)
        # in flushes, stages of one wave may stand on either side of the end of T3; and τ is told by D only if N = 1
        self.merges = not self.warmup and self.micro_batches == 1

    @classmethod
    def derived(cls, stages: int, updates: int) -> dict[str, Any]:
        """anneal: a quarter of the training."""
        return {"anneal": max(1, updates // 4)}

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        rest = self.warmup - start
        return self.schedule if rest <= 0 else WarmUp(rest, Flowing(self.slack, self.micro_batches))

    def init(self, weights: Weights) -> State:
        state: State = {"updates": 0}  # since the end of the warm-up
        return {**state, "drift": [torch.zeros_like(w) for w in weights]} if self.t2 else state

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        if not self.t2 or not any(when.delays) or when.mb < self.warmup:
            return weights
        return Shift(weights, [-D for D in when.delays], state["drift"])

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        warm, late = when.mb < self.warmup, self.t2 and any(when.delays)
        before = noted(weights) if late else []
        divided = self.t1 and not warm
        with each_divided(optimizer, weights, self._divisors(when, state)) if divided else nullcontext():
            optimizer.step()
        if late:
            gammas, (drift, steps) = by_number(self._gammas(when), state["drift"], moved(weights, before))
            torch._foreach_mul_(drift, list(gammas))
            for d, step, gamma in zip(drift, steps, gammas, strict=True):
                d.add_(step, alpha=1 - gamma)
        return state if warm else self.advanced(state, 1)

    def update_rates(self, when: When, state: State) -> Sequence[float]:
        if not self.t1 or not when.rates or when.mb < self.warmup:
            return when.rates
        return [rate / divisor for rate, divisor in zip(when.rates, self._divisors(when, state), strict=True)]

    def correction(self, when: When, state: State) -> Correction | None:
        count = len(when.rates)
        late = self.t2 and count and any(when.delays)
        divisors = self._divisors(when, state) if self.t1 and count else [1.0] * count
        updates = state.get("updates", 0)
        return Correction(
            back=[-float(D) for D in when.delays] if late else [0.0] * count,
            drift=list(self._gammas(when)) if late else [1.0] * count,
            rates=[rate / divisor for rate, divisor in zip(when.rates, divisors, strict=True)],
            varies=self.anneal is not None
            and self.t1
            and (min(updates) if isinstance(updates, tuple) else updates) < self.anneal,
            along="drift" if self.t2 else "",
        )

    def advanced(self, state: State, updates: int) -> State:
        before = state["updates"]
        after = tuple([k + updates for k in before]) if isinstance(before, tuple) else before + updates
        return {**state, "updates": after}

    def _gammas(self, when: When) -> Sequence[float]:
        """γ of every weight; 1 without a delay."""
        return _gammas(self.decay, tuple(when.delays))

    def _divisors(self, when: When, state: State) -> list[float]:
        """τ^p of every weight."""
        assert self.anneal is not None
        updates = state["updates"]
        if not isinstance(updates, tuple):
            tau = max(1.0, _flying(self.slack, self.micro_batches, when.stages)[when.stage] / self.micro_batches)
            return [float(tau ** (1 - min(updates / self.anneal, 1)))] * len(when.delays)
        # N = 1: of a stage, D + 1 micro-batches are in flight
        pairs = list(zip(when.delays, updates, strict=True))
        of = {(D, k): (1.0 + D) ** (1 - min(k / self.anneal, 1)) for D, k in dict.fromkeys(pairs)}
        return [of[pair] for pair in pairs]


@cache
def _flying(slack: int, every: int, stages: int) -> list[int]:
    return in_flight(flowing(slack, every=every), stages)


@lru_cache(maxsize=256)
def _gammas(decay: float, delays: tuple[int, ...]) -> tuple[float, ...]:
    return tuple([decay ** (1 / D) if D else 1.0 for D in delays])
