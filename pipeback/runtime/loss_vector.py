"""Loss vector: the losses of a push in one tensor, as they come, in the order of their micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


class LossVector:
    """The 0-d losses of `count` micro-batches, numbered from `first` on: an element each, and no tensor of its own."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.come = first, count, 0
        self._losses: Tensor | None = None

    def put(self, mb: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch."""
        self.come += 1
        if self.count == 1:
            self._losses = loss
            return
        if self._losses is None:
            self._losses = loss.new_empty(self.count)
        elif loss.dtype != self._losses.dtype:  # as autocast may have it
            self._losses = self._losses.to(torch.promote_types(loss.dtype, self._losses.dtype))
        self._losses[mb - self.first] = loss

    def mean(self, sizes: list[int] | None) -> Tensor:
        """The mean loss, weighted by `sizes` (samples per micro-batch) if they are given."""
        assert self._losses is not None
        if self.count == 1:
            return self._losses
        if sizes is None:
            return self._losses.mean()
        weights = torch.tensor(sizes, dtype=self._losses.dtype, device=self._losses.device)
        return (self._losses * weights).sum() / weights.sum()
