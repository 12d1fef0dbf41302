"""Step clipping: the limits of gradients that hooks ask for before a step by `self.clip_gradients`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from pipeback.lightning.fit_rank import Rank
from pipeback.pipeline.arguments import Clipping
from pipeback.pipeline.pipeline import Pipeline


class StepClipping:
    """Clips the gradients of the stages as the hooks before each step ask for; without a hook, as the Trainer does.

    limits: those of the updates that are due, and of those that come before the next step.
    """

    def __init__(self, rank: Rank, trainer: Trainer) -> None:
        self._rank = rank
        self.limits = Clipping(*norm_and_value(trainer.gradient_clip_val, trainer.gradient_clip_algorithm))
        self._asked = False  # whether a hook before the coming step has asked for limits

    def ask(self, pipe: Pipeline, norm: float | None, value: float | None) -> None:
        """Clip gradients that are means at once, so that hooks see it; others where the updates divide them."""
        limits = Clipping(norm, value)
        if limits == Clipping():
            return
        limits.check()
        self._asked = True
        self._set(pipe, Clipping() if pipe.clip_averaged(norm, value) else limits)

    def begin_step(self, pipe: Pipeline) -> None:
        """Lift the limits of an earlier step, unless a hook has asked for some before this one."""
        if not self._asked and self.limits != Clipping():
            self._set(pipe, Clipping())
        self._asked = False

    def _set(self, pipe: Pipeline, limits: Clipping) -> None:
        self.limits = limits
        if self._rank.clips(limits.norm, limits.value):
            pipe.clip(limits.norm, limits.value)


def norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """The largest norm of a stage's gradient and the largest absolute value of an entry; None: no limit."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)
