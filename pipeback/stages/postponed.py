"""Postponed: what a stage keeps of a split backward between I and W, the gradients of the input and of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.private import identity, listened, registered
from pipeback.stages.flight import Flight
from pipeback.stages.graph_cuts import Forms


class WeightPass(NamedTuple):
    """What one call of autograd begins with, and the weights that it is to reach."""

    edges: Sequence[Any]
    seeds: Sequence[Tensor]
    params: Sequence[Tensor]


class Postponed(NamedTuple):
    """What W of a micro-batch will need."""

    parts: Sequence[WeightPass] | None  # None: nothing was cut, and `whole` is all of B, or `found` its result
    whole: tuple[Sequence[Any], Sequence[Tensor]]
    options: Any  # the optimizer's options when the micro-batch was pushed
    number: float  # of micro-batches, or samples, that it counts as
    found: Sequence[Tensor | None] | None = None  # gradients that are known, one per weight


class SplitBackward:
    """The micro-batches of one stage between I and W.

    why: what kept the last backward from being split, if it was not. peak: the most micro-batches that have waited at
    once. bytes: what one of them holds beside its graph, at most.
    late: whether the weights may be updated between I and W. Then W must not read them, and what I does of it must not
    be in the sums before W.
    forms: where the graphs of this stage were cut.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Postponed] = {}
        self.peak = self.bytes = 0
        self.late = False
        self.why = ""
        self.forms = Forms()
        self._heard: tuple[int, str | None] = (-1, None)

    def begin(self, late: bool) -> None:
        """Note whether the weights may be updated between I and W."""
        self.late = late

    def wait(self, mb: int, rest: Postponed) -> None:
        """Keep what W(mb) needs."""
        self.waiting[mb] = rest
        self.peak = max(self.peak, len(self.waiting))
        seeds = [*rest.whole[1], *(g for g in rest.found or () if g is not None)]
        seeds += [g for part in rest.parts or () for g in part.seeds]
        held = {identity(g): g.untyped_storage().nbytes() for g in seeds if g.layout is torch.strided}
        self.bytes = max(self.bytes, sum(held.values()))

    def forget(self, first: int) -> None:
        """Forget the micro-batches from `first` on."""
        for mb in [mb for mb in self.waiting if mb >= first]:
            del self.waiting[mb]

    def kept_whole(self, stage: Any, flight: Flight) -> str:
        """What is known to keep this backward from being split, without a look at its graph."""
        if stage.keeping is not None:
            return "its activations are not kept as they are"
        now = registered()
        if now < 0 or self._heard[0] != now:
            self._heard = now, listened(stage.module)
        if self._heard[1]:
            return f"there are hooks on {self._heard[1]}"
        return "its forward registered hooks" if flight.heard else ""
