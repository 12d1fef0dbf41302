"""Delay-compensated gradients (DC-ASGD).

    g' = g + λ·g∘g∘(w_t − w_F)        w ← step(w, g')        λ = 0.04
    adaptive:  λ = λ₀ / √(q + ε)      q ← 0.95·q + 0.05·g∘g  λ₀ = 2, ε = 1e-7

The gradient g of the weights w_F on which the forward ran is carried to the weights w_t to which it is applied, by the
first order of a Taylor series in which g∘g stands for the diagonal of the Hessian; ∘ multiplies entry by entry. The
forward F runs on w_t, the backward B on w_F, so that g is a true gradient. g is the averaged and clipped gradient,
without weight decay.

Zheng et al., ICML 2017 (arXiv 1609.08326), section 4; λ as in MXNet's implementation, the constants of the adaptive
form as commonly described. Any optimizer. Weight copies: D + 2, one per version in flight, D the stage's delay in
updates; the adaptive form keeps one more copy as state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeback.methods.base import Chosen, Correction, Method, OptimizerLike, State, Weights, When
from pipeback.methods.columns import positive
from pipeback.methods.gradients import gradients, replaced
from pipeback.methods.option_checks import check_number, check_share, require_dense, require_real
from pipeback.schedules.programs import flowing

TINY = 1e-7


@dataclass(repr=False)
class DelayCompensation(Method):
    """strength: λ, or λ₀ if `adaptive`; None: 0.04, or 2. decay: of q. slack: 1 for the delays of asynchronous 1F1B."""

    strength: float | None = None
    adaptive: bool = False
    decay: float = 0.95
    slack: int = 1

    def __post_init__(self) -> None:
        if self.strength is not None:
            check_number("dc_asgd", "strength", self.strength)
        check_share("dc_asgd", "decay", self.decay)
        self.schedule = flowing(self.slack)
        self.copies = "stash"
        self.needs_used = True
        self.state_copies = int(self.adaptive)
        self.merges = self.takes_rows = True

    def check(self, optimizer: torch.optim.Optimizer, stages: int) -> None:
        require_real(optimizer, "dc_asgd")
        require_dense(optimizer, "dc_asgd")

    def init(self, weights: Weights) -> State:
        return {"squares": [torch.zeros_like(w) for w in weights]} if self.adaptive else {}

    def backward_weights(self, weights: Weights, used: Weights | None, state: State, when: When) -> Chosen:
        assert used is not None
        return used

    def update(self, weights: Weights, optimizer: OptimizerLike, state: State, when: When) -> State:
        numbers, given = gradients(weights)
        squares: list[Tensor] = []
        if self.adaptive and numbers:
            squares = [state["squares"][n] for n in numbers]
            torch._foreach_mul_(squares, self.decay)
            torch._foreach_addcmul_(squares, given, given, value=1 - self.decay)
        assert when.used is not None
        late = [n for n, number in enumerate(numbers) if positive(when.delays[number])]
        some = [numbers[n] for n in late]
        carried = [weights[n] - when.used[n] for n in some]
        strength = (2.0 if self.adaptive else 0.04) if self.strength is None else self.strength
        for n, x in zip(late, carried, strict=True):
            g = given[n]
            x.mul_(strength)
            if self.adaptive:
                x.div_(squares[n].add(TINY).sqrt_())
            x.mul_(g).mul_(g).add_(g)
        with replaced(weights, some, carried):
            optimizer.step()
        return state

    def correction(self, when: When, state: State) -> Correction:
        return Correction(used=True, own=True)
