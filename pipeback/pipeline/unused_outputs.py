"""Unused outputs: those of a model that the loss of a micro-batch leaves out, where stages run as one.

One by one, a weight that has an effect on such outputs alone gets no gradient, and its optimizer passes it over. As
one, it gets a gradient of zeros: momentum and weight decay still move it. That is said once per choice of outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.reach import lost
from pipeback.stages.stage import Stage


class UnusedOutputs:
    """Fills in gradients of zeros."""

    def __init__(self) -> None:
        self._seen = set[tuple[int, ...]]()  # outputs that were left out

    def filled(self, gradient: Any, output: Any, stages: Sequence[Stage]) -> Any:
        """Return the gradient of an output, with zeros where the loss left a part out. stages: those here."""
        if not isinstance(gradient, tuple) or not isinstance(output, tuple):
            return gradient
        missing = [n for n, (g, y) in enumerate(zip(gradient, output, strict=True)) if g is None and _followed(y)]
        if not missing:
            return gradient
        if tuple(missing) not in self._seen:
            self._seen.add(tuple(missing))
            self._tell(missing, stages)
        return tuple(
            torch.zeros_like(y) if n in missing else g for n, (g, y) in enumerate(zip(gradient, output, strict=True))
        )

    @staticmethod
    def _tell(missing: Sequence[int], stages: Sequence[Stage]) -> None:
        # stages before one with a single output get its gradient; those of other ranks are not known
        here = list(takewhile(lambda stage: stage.learnt.reach, reversed(stages)))[::-1]
        for place, weight in lost([stage.learnt.reach for stage in here], missing):
            stage = here[place]
            names = {id(p): name for name, p in stage.module.named_parameters()}
            warnings.warn(
                f"{stage.label}: {names.get(id(stage.params[weight]), 'a weight')} has an effect on outputs of the "
                "model alone that the loss leaves out. Where stages run as one, it gets a gradient of zeros, so that "
                "momentum and weight decay move it; vectorize=False leaves it as it is",
                stacklevel=2,
            )
            return


def _followed(part: Any) -> bool:
    return isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())
