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
from functools import cache
from typing import Any

import torch

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, Shift, State, Weights, When
from pipeback.methods.rates import divided_rates
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import Flowing, flowing
from pipeback.schedules.timeline import in_flight
from pipeback.schedules.warm_up import WarmUp


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
        if not self.t2 or not when.delay or when.mb < self.warmup:
            return weights
        return Shift(weights, [-when.delay] * len(weights), state["drift"])

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        warm = when.mb < self.warmup
        before = [w.detach().clone() for w in weights] if self.t2 else []
        with divided_rates(optimizer, self._divisor(when, state)) if self.t1 and not warm else nullcontext():
            optimizer.step()
        if self.t2 and when.delay:
            gamma = self._gamma(when)
            moved = torch._foreach_sub(weights, before)
            torch._foreach_mul_(state["drift"], gamma)
            torch._foreach_add_(state["drift"], moved, alpha=1 - gamma)
        return {**state, "updates": state["updates"] + (not warm)}

    def update_rates(self, when: When, state: State) -> Sequence[float]:
        if not self.t1 or when.mb < self.warmup:
            return when.rates
        return [rate / self._divisor(when, state) for rate in when.rates]

    def correction(self, when: When, state: State) -> Correction | None:
        count, late = len(when.rates), self.t2 and when.delay
        divisor = self._divisor(when, state) if self.t1 and count else 1.0
        return Correction(
            back=[-when.delay if late else 0.0] * count,
            drift=[self._gamma(when) if late else 1.0] * count,
            rates=[rate / divisor for rate in when.rates],
            varies=self.anneal is not None and self.t1 and state.get("updates", 0) < self.anneal,
            along="drift" if self.t2 else "",
        )

    def advanced(self, state: State, updates: int) -> State:
        return {**state, "updates": state["updates"] + updates}

    def _gamma(self, when: When) -> float:
        return float(self.decay ** (1 / when.delay))

    def _divisor(self, when: When, state: State) -> float:
        assert self.anneal is not None
        return float(self._tau(when) ** (1 - min(state["updates"] / self.anneal, 1)))

    def _tau(self, when: When) -> float:
        return max(1.0, _flying(self.slack, self.micro_batches, when.stages)[when.stage] / self.micro_batches)


@cache
def _flying(slack: int, every: int, stages: int) -> list[int]:
    return in_flight(flowing(slack, every=every), stages)
