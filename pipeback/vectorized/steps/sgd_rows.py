"""SGD rows: the step of momentum SGD over rows of weights, with forwards (F) on predicted weights.

g ← ∇f + λ·w        v ← m·v + g        w ← w − η·(a·v + b·g)        F on w + c·v        η, a, b, c: a number per row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.momentum import spike
from pipeback.stages.joint_optimizer import Options, groups_of
from pipeback.stages.stage import Stage
from pipeback.vectorized.steps.adam_rows import columns


@dataclass
class Step:
    """The numbers of a step of momentum SGD for all rows. Lists of tensors have one tensor (n, 1, …) per weight, with
    one number per row; an empty list means that the method does not use it.
    """

    momentum: float
    decays: tuple[float, ...]  # λ of every weight
    rates: list[list[float]]  # η of every row, of every weight
    like: Sequence[Tensor]  # the weights
    # T of spike compensation, of every row, of every weight; at T = 1 the step is Nesterov's, with a = m and b = 1
    late: list[list[float]] = field(default_factory=list)
    ahead: Sequence[Tensor] = ()  # c of F on w + c·v
    back: Sequence[Tensor] = ()  # c of B on w + c·v, or on w + c·δ
    drift: Sequence[Tensor] = ()  # 1 − γ of δ ← γ·δ + (1 − γ)·(w' − w)
    varies: bool = False  # whether its numbers hold for one update only

    @cached_property
    def rate(self) -> float | None:
        """η, if it is one number and the step is that of torch.optim.SGD; else None."""
        distinct = {rate for same in self.rates for rate in same}
        return distinct.pop() if len(distinct) == 1 and not self.late else None

    @cached_property
    def along(self) -> list[Tensor]:
        """−η·a of every weight, the factor of v."""
        return columns([[-rate * a for rate, (a, _) in some] for some in self._spikes], self.like)

    @cached_property
    def against(self) -> list[Tensor]:
        """−η·b of every weight, the factor of g; empty if g is not added."""
        late = [[-rate * b for rate, (_, b) in some] for some in self._spikes] if self.late else []
        return columns(late, self.like) if late else []

    @cached_property
    def undone(self) -> list[tuple[Tensor, Tensor]]:
        """Per weight −η·(a + b), the factor of v in a step without g, and η·b·m/c, that of F's ŵ − w; empty if unsafe.

        g = v' − m·v and ŵ = w + c·v give w' = w − η·(a·v' + b·g) = w − η·(a + b)·v' + (η·b·m/c)·(ŵ − w), for which no
        g need be kept. ŵ − w has the rounding of w, which must not grow.
        """
        if not (self.late and self.ahead and self.momentum) or self.varies or not all(map(_for_kernel, self.like)):
            return []
        shares = [torch.where(b == 0, 0, -b * self.momentum / c) for b, c in zip(self.against, self.ahead, strict=True)]
        if not all(bool((share.abs() <= 1).all()) for share in shares):
            return []
        return [(a + b, share) for a, b, share in zip(self.along, self.against, shares, strict=True)]

    def part(self, first: int, end: int) -> Step:
        """Return the step of some of the rows."""
        numbers, tensors = (
            {name: [some[first:end] for some in getattr(self, name)] for name in names}
            for names in (("rates", "late"), ("like", "ahead", "back", "drift"))
        )
        return Step(self.momentum, self.decays, **numbers, **tensors, varies=self.varies)

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties of a step that a compiled function relies on."""
        return bool(self.momentum), self.decays, bool(self.late), bool(self.ahead), bool(self.back)

    @property
    def _spikes(self) -> list[list[tuple[float, tuple[float, float]]]]:
        late = self.late or [[0.0] * len(same) for same in self.rates]
        return [
            [(rate, spike(self.momentum, T)) for rate, T in zip(*pair, strict=True)]
            for pair in zip(self.rates, late, strict=True)
        ]


def settings(stage: Stage, options: Options) -> list[tuple[float, float, bool]] | None:
    """Return momentum and weight decay of every weight, and whether its step is Nesterov's; None unless the optimizer
    is momentum SGD.
    """
    groups = groups_of(stage, options)
    if type(stage.optimizer) is not torch.optim.SGD or not all(group and _known(group) for group in groups):
        return None
    return [(group["momentum"], group["weight_decay"], bool(group["nesterov"])) for group in groups if group]


def _known(group: dict[str, Any]) -> bool:
    odd = ("dampening", "differentiable", "maximize")
    return not any(group.get(name) for name in odd) and not isinstance(group["lr"], Tensor)


def in_one_pass(step: Any, weights: Sequence[Tensor], velocities: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether torch's kernel of momentum SGD can make the step of these weights: at one rate, and on the CPU, where
    other steps take a pass through memory per operation.

    velocities: are asked for only where there are any. The kernel goes through memory in order, so that they must lie
    there as the weights do.
    """
    if not isinstance(step, Step) or not step.momentum or step.rate is None or not weights:
        return False
    if not all(map(_for_kernel, weights)):
        return False
    return all(v.stride() == w.stride() for v, w in zip(velocities(), weights, strict=True))


def _for_kernel(w: Tensor) -> bool:
    return w.is_cpu and w.dtype in _KINDS


_KINDS = torch.float32, torch.float64  # torch's kernel for half types rounds otherwise than its single operations
