"""Row clipping: bounds the gradients of stages that are rows, each stage's by itself, as the event loop does.

g ← g·min(1, c/(|g| + 10⁻⁶))        |g|: the norm over all weights of a stage        then every entry into [−v, v]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.runtime.worker import Worker
from pipeback.stages.averaging import clipped
from pipeback.vectorized.steps.row_tensors import RowTensors


class RowClipping:
    """The bounds that `worker` has now: c is its `clip_norm`, v its `clip_value`. stages: the number of each row's."""

    def __init__(self, worker: Worker, stages: Sequence[int]) -> None:
        self._worker, self._stages = worker, list(stages)

    def part(self, first: int, end: int) -> RowClipping:
        """Return that of some of the rows."""
        return RowClipping(self._worker, self._stages[first:end])

    @property
    def on(self) -> bool:
        """Whether gradients are clipped at all."""
        return bool(self._worker.clip_norm or self._worker.clip_value)

    def clip(self, rows: RowTensors, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of these rows, clipped; those that are given stay as they are."""
        if not grads or not self.on:
            return grads
        norm, value = self._worker.clip_norm, self._worker.clip_value
        over: Sequence[Tensor | None]
        if rows.several:
            found, over = _clipped(grads, norm, value)
        else:
            there, one = clipped(grads, norm, value)
            found, over = [g for g in there if g is not None], [one]
        if self._worker.watch is not None:
            for s, each in zip(self._stages, over, strict=True):
                self._worker.watch.count(s, each)
        return found


def _clipped(
    grads: Sequence[Tensor], norm: float | None, value: float | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return what `clipped` gives for the gradients of every row."""
    over = torch.zeros(len(grads[0]), dtype=torch.bool, device=grads[0].device)
    if norm is not None:
        of_weights = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads])
        scale = (norm / (torch.linalg.vector_norm(of_weights, dim=0) + 1e-6)).clamp(max=1.0)
        grads = torch._foreach_mul(list(grads), [scale.view(-1, *[1] * (g.dim() - 1)).to(g.dtype) for g in grads])
        over = scale < 1
    if value is not None:
        over = over.logical_or(torch.stack([(g.abs() > value).reshape(len(g), -1).any(1) for g in grads]).any(0))
        grads = [g.clamp(-value, value) for g in grads]
    return grads, over.unbind()
