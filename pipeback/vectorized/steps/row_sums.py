"""Row sums: sums the gradients of stages that run as one, where ticks are interpreted: together as long as all stages
have those of one micro-batch, and in the stages otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.trained_weights import frozen
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_plan import StepPlan


class RowSums:
    """The gradient sums of the stages of `rows`. plan: tells their step."""

    def __init__(self, rows: Rows, plan: StepPlan) -> None:
        self.rows, self.stages, self.plan = rows, rows.stages, plan
        self.sums: list[Tensor] | None = None  # gradients of one micro-batch per stage, if stages have none
        self._summed: set[int] = set()  # stages whose own gradients are sums over micro-batches
        self.frozen = frozen(self.stages)  # rows and weights that get no gradient

    def note_frozen(self) -> bool:
        """Note which weights are frozen from now on; return whether they are others than before."""
        before, self.frozen = self.frozen, frozen(self.stages)
        return self.frozen != before

    def add(self, grads: list[Any], rows: Sequence[int]) -> None:
        """Add gradients, one micro-batch for each of these rows, to the gradient sums of the stages. grads: of every
        weight a tensor (n, …), or tensors by rows.
        """
        whole = len(rows) == len(self.stages) and not self.frozen
        if whole and all(not stage.gradients.count for stage in self.stages):
            self.sums = grads
        else:
            self.spread()
            some = [self.rows.of(g) if isinstance(g, Tensor) else g for g in grads]
            if self.frozen:
                self._add_trained(some, rows)
            else:
                self._add_apart(some, rows)
        for r in rows:
            self.stages[r].gradients.count_more(1)

    def _add_trained(self, grads: Sequence[Any], rows: Sequence[int]) -> None:
        """Add to each stage's own sum, except to those of frozen weights, which stay as they are, or none."""
        found: list[dict[int, Any]] = [{r: g[r] for r in rows} for g in grads]
        mine = [(r, n, self.stages[r].gradients) for r, n in self.frozen if r in rows]
        none = [(n, own) for _, n, own in mine if not own.count or own.values[n] is None]
        for r, n, _ in mine:
            found[n][r] = torch.zeros_like(found[n][r])
        self._add_apart(found, rows)
        for n, own in none:
            own.values[n] = None

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
