"""Staleness: measures staleness by following one micro-batch through every stage now and then.

    gap_s = ‖w_now − w_used‖    w_used: the weights (predictions included) that the forward F(i) of stage s ran on
                                w_now: the newest weights of stage s when the backward B(i) begins

The watch keeps a copy of w_used from F to B. So a watched pipeline holds one more copy of the weights, in host memory
where they live in a store. Watching changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pipeback.counts import counted
from pipeback.notebook import number, table
from pipeback.stages.stage import Stage
from pipeback.tensors.weight_list import Weights


class Watch:
    """The last measurements of every stage; NaN before the first one, or where another process holds the stage.

    gap, update  Euclidean norms: of w_now − w_used of the followed micro-batch, and of one update since `mark`
    delay        own updates between F and B of the followed micro-batch, as it happened
    clip_share   share of the updates since `mark` whose gradient was clipped
    """

    def __init__(self, stages: int) -> None:
        nan = math.nan
        self.first = 0  # the first of these stages, from which a micro-batch is followed
        self.gap, self.update, self.delay = [nan] * stages, [nan] * stages, [nan] * stages
        self._clips: list[list[Tensor]] = [[] for _ in range(stages)]
        self._updates = [0] * stages
        # a context in which a stage's newest weights can be read
        self.newest: Callable[[Stage], AbstractContextManager[None]] = lambda stage: nullcontext()
        self._follow = False
        self._mb = -1
        self._used: dict[int, tuple[int, Weights]] = {}  # version and weights that F used, by stage
        self._measure: set[int] = set()  # stages whose next update is measured
        self._before: dict[int, Weights] = {}

    def follow(self) -> None:
        """Follow the next micro-batch to enter, unless one is still on its way."""
        self._follow = not self._used

    def mark(self) -> None:
        """Restart the count of clipped updates, and measure the next update of every stage."""
        self._measure = set(range(len(self.gap)))
        self._clips = [[] for _ in self.gap]
        self._updates = [0] * len(self.gap)

    @property
    def busy(self) -> bool:
        """Whether operations have to be looked at now, one by one."""
        return self._follow or bool(self._used) or bool(self._measure)

    @property
    def clip_share(self) -> list[float]:
        """Return the share of clipped updates of every stage."""
        return [
            float(torch.stack(clips).float().sum()) / updates if clips else 0.0 if updates else math.nan
            for clips, updates in zip(self._clips, self._updates, strict=True)
        ]

    def __repr__(self) -> str:
        known = sum(not math.isnan(gap) for gap in self.gap)
        return f"Watch({counted(len(self.gap), 'stage')}, the gap of {known} measured)"

    def _repr_html_(self) -> str:
        measured = zip(self.delay, self.gap, self.update, strict=True)
        rows = [(n, *map(number, values)) for n, values in enumerate(measured)]
        waiting = (
            "" if any(gap == gap for gap in self.gap) else "Nothing was measured yet: push, and call watch() again."
        )
        return table(repr(self), ["stage", "delay", "gap", "norm of one update"], rows, waiting)

    # -- calls by the worker: before F, after it with its weights in place, at B with the newest still in place ------

    def before_forward(self, ops: Sequence[tuple[int, int]]) -> None:
        """Choose the micro-batch to follow, given (stage, micro-batch): before its F at another worker can begin."""
        for s, mb in ops:
            if self._follow and s == self.first:
                self._follow, self._mb = False, mb

    def forward(self, ops: Sequence[tuple[Stage, int]]) -> None:
        for stage, mb in ops:
            if mb == self._mb:
                used = [w.detach() for w in stage.live()]
                copies = (
                    [w.clone() for w in used] if stage.home.slot is None else [w.to("cpu", copy=True) for w in used]
                )
                self._used[stage.index] = stage.version, copies

    def backward(self, ops: Sequence[tuple[Stage, int]]) -> None:
        for stage, mb in ops:
            if mb == self._mb and stage.index in self._used:
                version, used = self._used.pop(stage.index)
                self.delay[stage.index] = stage.version - version
                with self.newest(stage):
                    self.gap[stage.index] = _distance(stage, _newest(stage), used, computing=True)

    def count(self, s: int, clipped: Tensor | None) -> None:
        """Count an update of a stage. clipped: whether its gradient was, as a 0-d tensor; None: there is no limit."""
        self._updates[s] += 1
        if clipped is not None:
            self._clips[s].append(clipped)

    def before_update(self, stage: Stage, clipped: Tensor | None) -> None:
        self.count(stage.index, clipped)
        if stage.index in self._measure:
            self._measure.discard(stage.index)
            self._before[stage.index] = [w.detach().clone() for w in stage.weights]

    def after_update(self, stage: Stage) -> None:
        before = self._before.pop(stage.index, None)
        if before is not None:
            self.update[stage.index] = _distance(stage, stage.weights, before, computing=False)


def _newest(stage: Stage) -> Weights:
    """Return the newest weights as dense tensors."""
    sparse = stage.home.sparse
    return (
        stage.weights
        if sparse is None
        else [sparse.expanded(stage, n, w.detach()) for n, w in enumerate(stage.weights)]
    )


def _distance(stage: Stage, a: Weights, b: Weights, *, computing: bool) -> float:
    """‖a − b‖ over whole weights. computing: whether it is asked for at a backward, and not at an update."""
    if not a:
        return math.nan
    with torch.no_grad():
        if stage.home.shards is not None:
            return float(stage.home.shards.norm([x - y for x, y in zip(a, b, strict=True)], computing=computing))
        return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)))
