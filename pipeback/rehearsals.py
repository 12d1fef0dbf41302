"""Rehearsals: which micro-batches are rehearsed before they are let in, by the stages of every replica and rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeback.holding import Holding
from pipeback.loop import Batch
from pipeback.rehearsal import rehearse, rehearse_shape
from pipeback.stage import Stage, Value

Relay = Callable[[Value, Callable[[Sequence[Stage], Value], Value]], object]  # over processes: each rank does its part


class Rehearsals:
    """In full whenever modules are set to train or to evaluate otherwise; of a smaller micro-batch than any, its shape.

    delays: of every stage. warn: functions of the weights in a graph are warned of, not refused.
    """

    def __init__(self, holding: Holding, delays: Sequence[int], warn: bool) -> None:
        self._holding, self._delays, self._warn = holding, delays, warn
        self._smallest: int | None = None  # samples of the smallest micro-batch so far
        self._modes: list[bool] = []  # whether each stage was set to train then

    @property
    def _anew(self) -> bool:
        return self._smallest is None or self._modes != self._training()

    def _training(self) -> list[bool]:
        return [stage.module.training for stage in self._holding.stages]

    def due(self, batches: Sequence[Batch]) -> bool:
        """Whether one of these has to be rehearsed."""
        if self._smallest is None or self._anew:
            return True
        # with shards, replicas would have to gather weights for it all at once, whatever they push
        return smallest(batches)[2] < self._smallest and not self._holding.shards

    def run(self, batches: Sequence[Batch], relay: Relay | None = None) -> None:
        """Rehearse what has to be; the pipeline must be quiet. relay: None: all stages are in this process."""
        anew = self._anew
        if anew:
            self.whole(batches[0], relay)
        if not anew or smallest(batches)[2] < batches[0][2]:
            self._through(smallest(batches), self._shape, relay)

    def whole(self, batch: Batch, relay: Relay | None = None) -> None:
        """Rehearse one in full, and measure the seconds of F and B of each stage."""
        seconds = self._through(batch, self._full, relay)
        self._holding.seconds = seconds or self._holding.seconds

    def done(self, batches: Sequence[Batch]) -> None:
        """They will be let in."""
        least = smallest(batches)[2]
        self._modes, self._smallest = self._training(), least if self._smallest is None else min(least, self._smallest)

    def forget(self) -> None:
        """Other weights and buffers are there: all anew."""
        self._smallest = None

    def _through(
        self, batch: Batch, rehearsal: Callable[..., tuple[list[float], Value]], relay: Relay | None
    ) -> list[float]:
        x, y, _ = batch
        if relay is not None:
            relay(x, lambda stages, value: rehearsal(stages, value, y)[1])
            return []
        seconds = [rehearsal(stages, x, y)[0] for stages in self._holding.everywhere]
        return seconds[0]

    def _full(self, stages: Sequence[Stage], x: Value, y: Any) -> tuple[list[float], Value]:
        holding = self._holding
        return rehearse(stages, holding.method, self._delays, x, y, warn=self._warn, present=holding.present)

    def _shape(self, stages: Sequence[Stage], x: Value, y: Any) -> tuple[list[float], Value]:
        value = x
        for stage in stages:
            with self._holding.present(stage):
                value = rehearse_shape([stage], value, y)
        return [], value


def smallest(batches: Sequence[Batch]) -> Batch:
    """The first of those with the fewest samples."""
    return min(batches, key=lambda batch: batch[2])
