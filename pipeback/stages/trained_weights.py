"""Trained weights: which weights the user has frozen (`requires_grad_(False)`) since the pipeline was built.

Autograd gives these no gradient from then on, not even those of micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from torch import Tensor

from pipeback.stages.stage import Stage

_needs = attrgetter("requires_grad")


class Trained:
    """Which of some weights are trained, as it is now."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = list(weights)
        self._were = list(map(_needs, self._weights))

    def changed(self) -> bool:
        """Whether one of them was frozen since, or is trained again."""
        return list(map(_needs, self._weights)) != self._were


def frozen(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """The weights of these stages that are frozen now: which stage of the sequence, and which of its weights."""
    return [(r, n) for r, stage in enumerate(stages) for n, p in enumerate(stage.params) if not p.requires_grad]
