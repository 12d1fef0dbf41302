"""Adam rows: the step of Adam and AdamW over rows of weights, each row at a number of updates of its own.

g ← ∇f + λ·w (AdamW: w ← w − η·λ·w)        p ← β₁·p + (1 − β₁)·g        q ← β₂·q + (1 − β₂)·g²
w ← w − η · (a·p/(1 − β₁ᵗ) + b·g) / (√(q/(1 − β₂ᵗ)) + ε)        η, t, a, b: a number per row; a = 1, b = 0 in torch

Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101. To rounding it is torch.optim's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.methods.adam import adam_spike
from pipeback.private import fused_adam
from pipeback.stages.joint_optimizer import Options, groups_of
from pipeback.stages.stage import Stage
from pipeback.tensors.flat_buffer import dense

PLAIN = ("amsgrad", "maximize", "capturable", "differentiable")  # options that must be off
KINDS = torch.float32, torch.float64  # torch's fused step rounds half types otherwise than its single operations
FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"  # the names of what torch keeps per weight


class AdamSettings(NamedTuple):
    """The options that all rows share. decays: λ of every weight."""

    betas: tuple[float, float]
    eps: float
    decoupled: bool
    decays: tuple[float, ...]


@dataclass
class AdamStep:
    """The numbers of a step of Adam for all rows, as `Step` for momentum SGD. rates: η per weight and row. Shifts are
    along δ.
    """

    settings: AdamSettings
    rates: list[list[float]]
    like: Sequence[Tensor]
    late: Sequence[list[float]] = ()  # T of spike compensation, per weight and row
    ahead: Sequence[Tensor] = ()
    back: Sequence[Tensor] = ()
    drift: Sequence[Tensor] = ()
    varies: bool = False
    _known: tuple[Any, ...] = field(default=(None, None, None, None), init=False, repr=False, compare=False)

    def part(self, first: int, end: int) -> AdamStep:
        """Return the step of some of the rows."""
        rates, late = ([some[first:end] for some in numbers] for numbers in (self.rates, self.late))
        tensors = ([t[first:end] for t in some] for some in (self.like, self.ahead, self.back, self.drift))
        like, ahead, back, drift = tensors
        return AdamStep(self.settings, rates, like, late, ahead, back, drift, self.varies)

    @property
    def form(self) -> tuple[Any, ...]:
        """Return the properties of a step that a compiled function relies on."""
        return *self.settings, bool(self.late), bool(self.ahead), bool(self.back)

    def move(
        self,
        weights: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Tensor,
        grads: Sequence[Tensor],
    ) -> None:
        """Step weights (n, …). first, second: p and q. steps: updates done, (weights, n)."""
        (b1, b2), eps, decoupled, _ = self.settings
        steps += 1
        fused = fused_adam(decoupled=decoupled)
        apart, rest, others = self._apart
        lists = self._lists(weights, first, second, steps) if apart else []
        for ((rate, decay), numbers), (mine, means, squares, counts) in zip(apart.items(), lists, strict=True):
            # torch's kernel ignores strides
            laid = [
                g if g.stride() == w.stride() else torch.empty_like(w).copy_(g)
                for g, w in ((grads[m], weights[m]) for m in numbers)
            ]
            fused(
                mine, self._rows(laid), means, squares, [], counts, lr=rate, beta1=b1, beta2=b2, weight_decay=decay,
                eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        if rest:
            every = (weights, first, second, grads, self.columns, *self.spikes)
            _moved(others, steps[rest], *([some[m] for m in rest] for some in every))

    @cached_property
    def _apart(self) -> tuple[dict[tuple[float, float], list[int]], list[int], AdamSettings]:
        """Return the numbers of the weights that torch's fused step moves, by η and λ, which are the same for all their
        rows; the numbers of the others, and their settings.

        It takes one pass through memory where others take a pass per operation. It goes there in order, so that a
        weight must not leave gaps, as a slice of columns does.
        """
        apart: dict[tuple[float, float], list[int]] = {}
        rest = []
        for m, (w, rates) in enumerate(zip(self.like, self.rates, strict=True)):
            alike = w.is_cpu and w.dtype in KINDS and len(set(rates)) == 1 and not self.late
            if alike and w.stride() == dense(w):
                apart.setdefault((rates[0], self.settings.decays[m]), []).append(m)
            else:
                rest.append(m)
        return apart, rest, self.settings._replace(decays=tuple(self.settings.decays[m] for m in rest))

    def _lists(
        self, weights: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], steps: Tensor
    ) -> list[tuple[list[Tensor], ...]]:
        """Return rows of weights, p and q, and their numbers of updates, for every fused step; made once while the
        tensors are the same.
        """
        known = self._known
        if known[0] is not weights or known[1] is not first or known[2] is not steps:
            lists = [
                (
                    *(self._rows([some[m] for m in numbers]) for some in (weights, first, second)),
                    [count for m in numbers for count in steps[m].unbind()],
                )
                for numbers in self._apart[0].values()
            ]
            known = self._known = weights, first, steps, lists
        found: list[tuple[list[Tensor], ...]] = known[3]
        return found

    def _rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors) if len(self.rates[0]) == 1 else [row for t in tensors for row in t.unbind()]

    @cached_property
    def columns(self) -> list[Tensor]:
        """η of every row, (n, 1, …)."""
        return columns(self.rates, self.like)

    @cached_property
    def spikes(self) -> tuple[list[Tensor], ...]:
        """a and b of every row, as columns; empty if gradients are not compensated."""
        if not self.late:
            return ()
        pairs = [[adam_spike(self.settings.betas[0], T) for T in some] for some in self.late]
        a, b = ([[pair[n] for pair in some] for some in pairs] for n in (0, 1))
        return columns(a, self.like), columns(b, self.like)


def columns(numbers: Sequence[Sequence[float]], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of all rows as one tensor (n, 1, …) per weight, which multiplies that weight row by row.

    A single number of a stage alone has no dimension.
    """
    return [
        torch.tensor(some, dtype=w.dtype, device=w.device).view([-1, *[1] * w.dim()][: w.dim()])
        for some, w in zip(numbers, like, strict=True)
    ]


def adapted(
    settings: AdamSettings,
    weights: Sequence[Tensor],
    kept: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
    grads: Sequence[Tensor],
    numbers: Sequence[Sequence[Tensor]],
) -> None:
    """Do what `AdamStep.move` does, written for a compiler. kept: p, q and the updates done. numbers: η, and with spike
    compensation a and b, as columns.
    """
    first, second, steps = kept
    _moved(settings, steps.add_(1), weights, first, second, grads, *numbers)


def _moved(settings: AdamSettings, steps: Tensor, *given: Sequence[Tensor]) -> None:
    """Step weights with operations over all rows at once. given: for each weight w, p, q, g and η as columns, and with
    spike compensation a and b.
    """
    (b1, b2), eps, decoupled, decays = settings
    t = steps.double()
    roots, sizes = 1 / torch.sqrt(1 - b2**t), -1 / (1 - b1**t)
    for decay, root, size, w, p, q, g, rates, *late in zip(decays, roots, sizes, *given, strict=True):
        if decay and decoupled:
            w.mul_(1 - rates * decay)
        elif decay:
            g = g + decay * w  # not add(…, alpha=decay), see `tick.descended`
        p.lerp_(g, 1 - b1)
        q.mul_(b2).addcmul_(g, g, value=1 - b2)
        below = torch.sqrt(q).mul_(root.to(q).view_as(rates)).add_(eps)
        along, size = p, size.to(q).view_as(rates)
        if late:
            a, b = late
            along, size = torch.addcmul(b * g, p, a * -size), -torch.ones_like(rates)
        w.addcmul_(along / below, rates * size)


def settings(stage: Stage, options: Options) -> AdamSettings | None:
    """Return the settings in a stage's options; None unless its optimizer is plain Adam or AdamW."""
    if type(stage.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    decoupled = type(stage.optimizer) is torch.optim.AdamW
    common, decays = set(), []
    for group in groups_of(stage, options):
        if group is None or any(group.get(name) for name in PLAIN):
            return None
        if any(isinstance(v, Tensor) for v in (group["lr"], group["eps"], group["weight_decay"], *group["betas"])):
            return None
        common.add((tuple(group["betas"]), group["eps"], bool(group.get("decoupled_weight_decay", decoupled))))
        decays.append(group["weight_decay"])
    return AdamSettings(*common.pop(), tuple(decays)) if len(common) == 1 else None
