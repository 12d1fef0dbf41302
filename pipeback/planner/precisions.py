"""Precisions: bytes per parameter of weights, gradients, masters and optimizer states.

| name  | weights | gradients | masters | AdamW | momentum | with AdamW |                                       |
| ----- | ------- | --------- | ------- | ----- | -------- | ---------- | ------------------------------------- |
| mixed | 2       | 4         | 4       | 8     | 4        | 18         | Megatron-LM, theoretical_memory_usage |
| float | 4       | 4         | 0       | 8     | 4        | 16         | pipeback without `masters`            |
"""

from __future__ import annotations

from typing import NamedTuple

from pipeback.planner import catalogue

STATES = {"adamw": 8, "adam": 8, "sgd": 4, "plain": 0}  # bytes in 32 bits; sgd has momentum, plain has none


class Precision(NamedTuple):
    """Bytes per parameter."""

    name: str
    weights: int
    gradients: int
    masters: int
    optimizer: int

    @property
    def state(self) -> int:
        """Of one copy of the weights that a method keeps as its state: as the optimizer steps them."""
        return self.masters or self.weights

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.optimizer


def precision(name: str = "mixed", optimizer: str = "adamw") -> Precision:
    """Raises ValueError for an unknown name, and suggests the nearest."""
    states = STATES[catalogue.key("optimizer", optimizer, STATES)]
    if catalogue.key("precision", name, ("mixed", "float")) == "mixed":
        return Precision("mixed", 2, 4, 4, states)
    return Precision("float", 4, 4, 0, states)
