"""What a fit asks of the rank that it runs on: a device that trains alone, or one of several."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from pipeback.pipeline.pipeline import Pipeline
from pipeback.runtime.runners import Judge
from pipeback.splitting.split import Split
from pipeback.streaming.store import Store


class Rank(Protocol):
    """The part of a fit that differs between a device that trains alone and one of several."""

    @property
    def several(self) -> bool:
        """Whether it is one of several."""

    def elsewhere(self, store: Store | None) -> str | None:
        """Which weights have no gradients in hooks, and why; None: they have."""

    def split(self, example: Any) -> Split:
        """The stages that the pipeline gets."""

    def trained(self, split: Split) -> list[list[nn.Parameter]]:
        """The user's parameters that each stage trains."""

    def piece(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank keeps of the optimizer's state of a parameter."""

    def pipeline(self, split: Split, **options: Any) -> Pipeline:
        """The pipeline over these stages."""

    def training_step(self) -> AbstractContextManager[None]:
        """A context within which the user's `training_step` runs."""

    def judging(self) -> AbstractContextManager[None]:
        """A context within a call of the pipeline, within which the user's code runs, and the stages wait for it."""

    def enter(self, fit: Any, xs: list[Any], expected: int, judge: Judge | None = None) -> list[Any] | None:
        """Run F of micro-batches of a `Fit` and return the outputs; None on ranks that do not compute the loss. judge:
        as of `Pipeline.forward_many`.
        """

    def forget(self, pipe: Pipeline) -> None:
        """Drop the micro-batch whose F has run: it gets no B."""

    def clips(self, norm: float | None, value: float | None) -> bool:
        """Whether the pipeline must be given these limits of the gradients, be they new or not."""
