"""Row clipping: bounds the gradients of stages that are rows, each stage's by itself, as the event loop does.

g ← g·min(1, c/(|g| + 10⁻⁶))        |g|: the norm over all weights of a stage        then every entry into [−v, v]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.runtime.worker import Worker
from pipeback.stages.gradients import clipped
from pipeback.vectorized.steps.row_tensors import RowTensors


class RowClipping:
    """The bounds that `worker` has now: c is its `clip_norm`, v its `clip_value`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def on(self) -> bool:
        """Whether gradients are clipped at all."""
        return bool(self._worker.clip_norm or self._worker.clip_value)

    def clip(self, rows: RowTensors, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of these rows, clipped; those that are given stay as they are."""
        norm, value = self._worker.clip_norm, self._worker.clip_value
        if not grads or not self.on:
            return grads
        if not rows.several:
            return [g for g in clipped(grads, norm, value)[0] if g is not None]
        if norm is not None:
            of_weights = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads])
            scale = (norm / (torch.linalg.vector_norm(of_weights, dim=0) + 1e-6)).clamp(max=1.0)
            grads = torch._foreach_mul(list(grads), [scale.view(-1, *[1] * (g.dim() - 1)).to(g.dtype) for g in grads])
        return grads if value is None else [g.clamp(-value, value) for g in grads]
