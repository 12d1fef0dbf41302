"""Loss stage: the last stage with its loss as one graph, which does F (forward), B (backward) and U (update) of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_form import How, Numbers, kept, numbers, shifted
from pipeback.vectorized.tracing.forms import leaves, packed
from pipeback.vectorized.tracing.graphs import Graph


class LossStage:
    """The last stage with the loss as one graph, since its F and B are of the same micro-batch."""

    def __init__(self, stage: Stage, graph: Graph, rows: Rows, x: Any, target: Any, *, check: bool) -> None:
        """rows: the stage's weights. check: whether the weights must stay if the loss is not finite."""
        self.stage, self.graph, self.rows, self.check = stage, graph, rows, check
        self.inputs, self.packed = len(leaves(x)), type(x) is tuple
        self.form = form(x, target)

    def eager(self, x: Any, target: Any, step: AnyStep) -> tuple[Tensor, Any, list[Tensor]]:
        """Return the loss, the gradient of the input, and those of the weights."""
        loss, *found = self.graph(*self.rows.whole.shifted(step.ahead), *leaves(x), target)
        return loss, packed(found[: self.inputs], self.packed), found[self.inputs :]

    def fixed(self, step: AnyStep, *, stay: bool) -> tuple[Any, ...]:
        """Return the first arguments of `compiled`: tensors that stay in place."""
        return self.rows.weights, kept(self.rows.whole, step)

    def changing(self, x: Any, target: Any) -> tuple[Any, ...]:
        """Return the next arguments of `compiled`: those that change at every tick."""
        return [v.contiguous() for v in leaves(x)], target.contiguous()

    def told(self, step: AnyStep) -> tuple[Any, ...]:
        """Return the last arguments of `compiled`: the numbers of the step."""
        return step.ahead, numbers(self.rows.whole, step)

    def compiled(
        self,
        how: How,
        weights: Sequence[Tensor],
        kept: Sequence[Any],
        xs: Sequence[Tensor],
        target: Any,
        ahead: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Do F, B and U, written for a compiler."""
        loss, *found = self.graph(*shifted(weights, self.rows.trained, kept, ahead), *xs, target)
        gxs, grads = found[: len(xs)], found[len(xs) :]
        if self.check:
            fine = torch.isfinite(loss)
            grads = [torch.where(fine, g, 0) for g in grads]
            if numbers:
                along, *others = numbers
                numbers = [torch.where(fine, c, 0) for c in along], *others
        how.step([weights[n] for n in self.rows.trained], kept, grads, numbers)
        return loss, gxs


def form(x: Any, *target: Any) -> tuple[Any, ...] | None:
    """Return the shapes and dtypes for which a graph of the last stage is made; None if there can be no graph."""
    both = (*leaves(x), *target)
    plain = all(type(v) is Tensor for v in both)
    return (type(x) is tuple, *((v.shape, v.dtype) for v in both)) if plain else None
