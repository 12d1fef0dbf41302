"""Lists of weights, and the arithmetic over them that is done in one call.

add_scaled   w ← w + c·x
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Weights = list[Tensor]  # the trainable parameters of a stage, in the order of module.parameters()


class Bundle(list[Tensor]):
    """The weights of one stage or of several; remembers what joint calls over them need."""

    velocities: list[Tensor] | None = None  # their momentum buffers, once all have one
    _ones: list[Tensor] | None = None
    _factor: tuple[float, Tensor] | None = None
    _chosen: tuple[tuple[int, ...], Bundle] | None = None

    @property
    def ones(self) -> list[Tensor]:
        """A 1 beside each weight, of its dtype and on its device."""
        if self._ones is None:
            kinds = {(w.dtype, w.device) for w in self}
            units = {kind: torch.ones((), dtype=kind[0], device=kind[1]) for kind in kinds}
            self._ones = [units[w.dtype, w.device] for w in self]
        return self._ones

    def factor(self, value: float) -> float | Tensor:
        """The factor as foreach multiplies by it fastest: a 0-d tensor on the CPU, with the bits of the number."""
        unit = self.ones[0]
        plain = unit.device.type == "cpu" and unit.dtype in (torch.float32, torch.float64)
        if not plain or any(one is not unit for one in self.ones):
            return value
        if self._factor is None or self._factor[0] != value:
            self._factor = (value, torch.full_like(unit, value))
        return self._factor[1]

    def forget(self) -> None:
        """The weights lie elsewhere now."""
        self.velocities = self._ones = self._factor = self._chosen = None

    def only(self, numbers: tuple[int, ...]) -> Bundle:
        """Some of them; the same bundle when asked again."""
        if self._chosen is None or self._chosen[0] != numbers:
            self._chosen = (numbers, Bundle(self[n] for n in numbers))
        return self._chosen[1]


def add_scaled(weights: Weights, coefficients: Sequence[float], directions: Sequence[Tensor | None]) -> None:
    """w ← w + c·x in place for every weight that has a direction: one call, one rounding for any number of weights."""
    given = [x for x in directions if x is not None]
    if len(given) < len(directions):
        there = [n for n, x in enumerate(directions) if x is not None]
        if not there:
            return
        weights, coefficients = [weights[n] for n in there], [coefficients[n] for n in there]
    ones = weights.ones if isinstance(weights, Bundle) else Bundle(weights).ones
    # c·x is rounded, then the sum: not x·c with a factor of one, which some kernels fuse for long tensors only
    torch._foreach_addcmul_(weights, given, ones, list(coefficients))
