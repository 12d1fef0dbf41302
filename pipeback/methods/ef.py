"""Error feedback of updates (EF).

    u_t = w_t − step(w_t, g)        w ← w_t − u_t − T·(u_t − u_{t−1})        T = D by default

A late update repeats what earlier ones have done meanwhile; what has changed from one update to the next is given T
times as much weight. The live weights are then those that linear weight prediction would shift to at each forward:
with ŵ = w + T·(w_t − w_{t−1}), ŵ_{t+1} = ŵ_t − u_t − T·(u_t − u_{t−1}), so `ef` is `lwp` in its weight form with the
backward on the prediction, too, and needs no scratch. The moments of the optimizer advance once per update.

The forward F and the backward B run on w_t, which is also what is evaluated; D is the stage's delay in updates. At the
first update of a stage u_{t−1} is taken to be u_t, as published, unless `first` is set. A weight without a gradient
stays as it is, and its u is forgotten.

Zmushko et al., arXiv 2606.30634, algorithms 1 and 2, there with T = 1 for a delay of one update. Any optimizer.
Weight copies: 1; u is one more copy as state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeback.methods.base import Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.columns import Number, added, column
from pipeback.methods.momentum import check_horizon
from pipeback.schedules.programs import flowing


@dataclass(repr=False)
class ErrorFeedback(Method):
    """horizon: T in updates; None: the stage's delay D. first: whether the first update is corrected, with u_{−1} = 0.

    slack: 2 for PB's delays.
    """

    horizon: float | None = None
    first: bool = False
    slack: int = 2

    def __post_init__(self) -> None:
        check_horizon("ef", self.horizon)
        self.schedule = flowing(self.slack)
        self.state_copies = 1
        self.takes_rows = True

    def init(self, weights: Weights) -> State:
        return {"updates": 0, "last": [torch.zeros_like(w) for w in weights]}

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        if not self.horizon and (self.horizon is not None or (not when.rows and not when.delay)):
            optimizer.step()
            return state
        moved = [w.detach().clone() for w in weights]
        optimizer.step()
        torch._foreach_sub_(moved, weights)
        if when.rows or state["updates"] or self.first:
            for w, u, last, D in zip(weights, moved, state["last"], when.delays, strict=True):
                if w.grad is not None:
                    T = self._horizon(D, state["updates"], w)
                    added(added(w, u, -T), last, T)
        torch._foreach_copy_(state["last"], moved)
        return {**state, "updates": state["updates"] + 1}

    def correction(self, when: When, state: State) -> Correction:
        return Correction(own=True)

    def _horizon(self, delay: Number, updates: Number, w: Tensor) -> Number:
        """T; 0 in rows whose first update is not corrected."""
        T = delay if self.horizon is None else self.horizon
        return T if self.first or not isinstance(updates, Tensor) else T * column(updates > 0, w)
