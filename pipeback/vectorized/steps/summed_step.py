"""Summed step: what a tick does with gradients where an update is of several micro-batches: it sums them. When the
update of a stage is due, the stage makes it by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class SummedStep:
    """As `Step`, with shifts alone. totals: the sums of gradients, a tensor (n, …) per weight.

    renewed: x of F on w + x at rows that have updated since the group of their micro-batch began (`Correction.group`).
    chosen: a column of ones at these rows, and of zeros elsewhere, per weight.
    """

    totals: list[Tensor]
    ahead: Sequence[Tensor] = ()
    back: Sequence[Tensor] = ()
    drift: Sequence[Tensor] = ()  # the stages' own updates see to it
    renewed: Sequence[Tensor] = ()
    chosen: Sequence[Tensor] = ()
    varies: bool = False
    _known: dict[tuple[bool, ...], SummedStep] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, rows: tuple[bool, ...]) -> SummedStep:
        """Return the step where these rows have updated since the group of their micro-batch began."""
        if rows not in self._known:
            each = [torch.tensor(rows, dtype=c.dtype, device=c.device).view_as(c) for c in self.ahead]
            ahead = [c * (1 - some) for c, some in zip(self.ahead, each, strict=True)]
            self._known[rows] = replace(self, ahead=ahead, chosen=each)
        return self._known[rows]

    def part(self, first: int, end: int) -> SummedStep:
        """Return the step of some of the rows."""
        every = self.totals, self.ahead, self.back, self.renewed, self.chosen
        totals, ahead, back, renewed, chosen = ([t[first:end] for t in some] for some in every)
        return SummedStep(totals, ahead, back, renewed=renewed, chosen=chosen)

    @property
    def form(self) -> tuple[object, ...]:
        """Return the properties of a step that a compiled function relies on."""
        return "summed", bool(self.ahead), bool(self.back)

    def shift(self, weights: Sequence[Tensor]) -> None:
        """Shift the weights of F, which are copies, along x."""
        for w, x, c in zip(weights, self.renewed, self.chosen, strict=False):
            w.addcmul_(x, c)

    def move(self, grads: Sequence[Tensor]) -> None:
        """Add the gradients of a micro-batch per row."""
        if grads:
            torch._foreach_add_(self.totals, list(grads))
