"""Row sums: sums the gradients of stages that run as one, where ticks are interpreted: together as long as all stages
have those of one micro-batch, and in the stages otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_plan import StepPlan


class RowSums:
    """The gradient sums of the stages of `rows`. plan: tells their step."""

    def __init__(self, rows: Rows, plan: StepPlan) -> None:
        self.rows, self.stages, self.plan = rows, rows.stages, plan
        self.sums: list[Tensor] | None = None  # gradients of one micro-batch per stage, if stages have none
        self._summed: set[int] = set()  # stages whose own gradients are sums over micro-batches

    def add(self, grads: list[Any], rows: Sequence[int]) -> None:
        """Add gradients, one micro-batch for each of these rows, to the gradient sums of the stages. grads: of every
        weight a tensor (n, …), or tensors by rows.
        """
        whole = len(rows) == len(self.stages)
        if whole and all(not stage.gradients.count for stage in self.stages):
            self.sums = grads
        else:
            self.spread()
            self._add_apart([self.rows.of(g) if isinstance(g, Tensor) else g for g in grads], rows)
        for r in rows:
            self.stages[r].gradients.count_more(1)

    def _add_apart(self, grads: Sequence[Any], rows: Sequence[int]) -> None:
        """Add to each stage's own sum: in place if it is a sum already, and not somebody else's gradient."""
        begun = [r for r in rows if self.stages[r].gradients.count]
        for r in begun:
            self.stages[r].gradients.hide()  # autograd may have added to them where a caller sees them
        for r in rows:
            values = self.stages[r].gradients.values
            if r not in begun:
                self._summed.discard(r)
                self.stages[r].gradients.replace([some[r] for some in grads])
            elif any(g is None for g in values):  # the stage has run the micro-batch on its own
                zeros = [torch.zeros_like(some[r]) for some in grads]
                self.stages[r].gradients.replace([z if g is None else g for z, g in zip(zeros, values, strict=True)])
        for ours in (True, False):
            some = [r for r in begun if (r in self._summed) == ours]
            old: list[Any] = [g for r in some for g in self.stages[r].gradients.values]
            new = [rows[r] for r in some for rows in grads]
            if ours and old:
                torch._foreach_add_(old, new)
            elif old:
                totals = torch._foreach_add(old, new)
                for n, r in enumerate(some):
                    self.stages[r].gradients.replace(list(totals[n * len(grads) : (n + 1) * len(grads)]))
        self._summed.update(begun)

    def apart(self, rows: Sequence[int]) -> None:
        """Give these stages gradient sums of their own, since autograd is about to add to them in place."""
        self.spread()
        for r in rows:
            if self.stages[r].gradients.count and r not in self._summed:
                own = self.stages[r].gradients
                own.hide()
                own.replace([None if g is None else g.clone() for g in own.values])
            self._summed.discard(r)

    def spread(self) -> None:
        """Give every stage its own gradient sums."""
        sums, self.sums = self.sums, None
        if sums is not None:
            self._summed.clear()
        for n, whole in enumerate(sums or ()):
            for stage, row in zip(self.stages, self.rows.of(whole), strict=True):
                stage.gradients.values[n] = row

    def step(self) -> bool:
        """Do U of all stages at once, if each is a step of Adam or of momentum SGD; return whether it was done.

        With momentum SGD the bits are those of one step per stage.
        """
        sums, count = self.sums, self.stages[0].gradients.count
        if sums is None or any(stage.gradients.count != count for stage in self.stages):
            return False
        step = self.plan.step([stage.options for stage in self.stages])
        if step is None:
            return False
        with torch.no_grad():
            self.rows.whole.move(step, sums if count == 1 else torch._foreach_div(sums, float(count)))
        self.sums = None
        for stage in self.stages:
            stage.gradients.count_anew()
        return True
