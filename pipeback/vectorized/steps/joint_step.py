"""Joint step: one step of momentum SGD for the weights of several stacks, in one pass through memory.

v ← m·v + g + λ·w        w ← w − η·v
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.private import fused_sgd
from pipeback.vectorized.steps.adam_rows import AdamStep
from pipeback.vectorized.steps.row_tensors import RowTensors
from pipeback.vectorized.steps.sgd_rows import Step, in_one_pass

Lists = tuple[list[Tensor], list[Tensor], list[Tensor]]  # weights, gradients and velocities


class JointStep:
    """Collects weights to step, by the numbers of their step: m, η and λ."""

    def __init__(self) -> None:
        self._kernel = fused_sgd()
        self._lists: dict[tuple[float, float, float], Lists] = {}

    @staticmethod
    def fits(rows: RowTensors, step: Step | AdamStep) -> bool:
        """Whether the weights can be part of the step."""
        return in_one_pass(step, rows.stepped, rows.velocities)

    def add(self, rows: RowTensors, step: Step, grads: Sequence[Tensor]) -> None:
        """Add the weights of these rows, which fit, with their gradients."""
        assert step.rate is not None
        for w, g, v, decay in zip(rows.stepped, grads, rows.velocities(), step.decays, strict=True):
            lists = self._lists.get((step.momentum, step.rate, decay))
            if lists is None:
                lists = self._lists[step.momentum, step.rate, decay] = [], [], []
            lists[0].append(w)
            lists[1].append(g if g.stride() == w.stride() else torch.empty_like(w).copy_(g))
            lists[2].append(v)

    def make(self) -> None:
        """Make the step of all weights that were added."""
        for (momentum, rate, decay), (weights, grads, velocities) in self._lists.items():
            self._kernel(
                weights, grads, velocities, weight_decay=decay, momentum=momentum, lr=rate, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        self._lists.clear()
