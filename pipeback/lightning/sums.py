"""Sums of gradients that Lightning is not to see: of groups of micro-batches that are under way.

A stage that updates every k micro-batches sums its gradients where autograd puts them. Lightning clears the gradients
of all parameters at its own times, so the sums are put aside then; hooks after backward see them.
"""

from __future__ import annotations

from torch import Tensor, nn


class Sums:
    """Of a module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    def hide(self) -> None:
        """No parameter has a gradient."""
        for p in self.module.parameters():
            if p.grad is not None:
                self._aside.append((p, p.grad))
                p.grad = None

    def show(self) -> None:
        """They are where B adds to them."""
        for p, grad in self._aside:
            p.grad = grad
        self._aside = []
