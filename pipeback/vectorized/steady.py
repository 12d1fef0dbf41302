"""Steady: chooses how the next ticks are run, if at each of them every stage, or every second one, does F (forward), B
(backward) and U (update) of one micro-batch: which stages run as one, whether the last stage with its loss is a graph,
and whether the whole tick is compiled. A `SteadyRun` runs the ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.private import listened
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Order
from pipeback.schedules.programs import Flowing
from pipeback.stages.flight import target_on
from pipeback.stages.team import StageGroup
from pipeback.vectorized.adam_rows import AdamStep
from pipeback.vectorized.bounded_cache import BoundedCache
from pipeback.vectorized.capture import Unfit, capture_loss_stage
from pipeback.vectorized.eligible import leaps, torchs
from pipeback.vectorized.forms import floating, leaves
from pipeback.vectorized.waiting import Waiting
from pipeback.vectorized.rows import Rows, Step
from pipeback.vectorized.stack import Compile, Stack
from pipeback.vectorized.steady_run import SteadyRun
from pipeback.vectorized.tick import LossStage, StackTick, form, fused
from pipeback.vectorized.verify import check_plain, judged_alike
from pipeback.vectorized.wiring import Where, wire


class Steady:
    """Runs steady ticks for a worker with `stacks`. judged: is called with every micro-batch and its loss."""

    def __init__(self, worker: Worker, judged: Callable[[int, Tensor], None], stacks: Sequence[Stack]) -> None:
        self.worker, self.judged, self.stacks = worker, judged, list(stacks)
        schedule = worker.method.schedule
        self.turns = schedule.turns if leaps(worker.method) and isinstance(schedule, Flowing) else 0
        self.last = worker.stages[worker.count - 1]
        self.done = 0  # ticks of the last run
        self._moving: BoundedCache[tuple[Waiting, ...], tuple[list[StackTick], Where]] = BoundedCache()
        self._judges: BoundedCache[Any, LossStage | None] = BoundedCache()
        self._judge_rows: Rows | None = None
        self._judged: Any = None  # an input of the last stage
        self._teams: dict[int, StageGroup] = {}  # groups of one stage each
        self._fused: BoundedCache[tuple[Any, ...], Any] = (
            BoundedCache()
        )  # by the stacks, the stage with the loss, and the form of the steps

    def run(self, order: Order, ticks: int) -> int:
        """Run as many of the next `ticks` ticks as are steady, and return their number."""
        self.done = 0
        ready = self._ready() if self.turns else None
        if ready is None:
            return 0
        forwards = [order.start + i for i in order.forwards]
        backwards = [order.start + i for i in order.backwards]
        options = {i: f.options for i, f in self.worker.stages[0].flights.items()}
        told = options | self.worker.options
        run = SteadyRun(self.worker, self.judged, *ready, self.turns, self._teams, forwards, backwards, told)
        judge = None
        if self._may_judge:
            x = self._judged = self.worker.link.box.get(("F", self.last.index, forwards[-1]), self._judged)
            if x is None:
                ticks = 1  # after that tick there is an input to make a graph for
            else:
                target = target_on(self.last.device, self.worker.link.box["Y", self.last.index, forwards[-1]])
                judge = self._judge(x, target)
        run.take(judge)
        compile = self.stacks[0].fuse
        if compile is not None and self.last.device != torch.device("cpu") and run.adapts():
            for stack in self.stacks:
                stack.leaps = False
            return 0
        run.begin()
        try:
            return run.ticks(ticks, None if compile is None else partial(self._tick, compile))
        finally:
            run.told()
            self.done = run.done
            for stack in self.stacks:
                stack.leaps = bool(run.turns[0].steps)

    def _ready(self) -> tuple[list[StackTick], Where] | None:
        kinds = [kind for stack in self.stacks if (kind := stack.one_kind) is not None]
        if len(kinds) < len(self.stacks):
            return None
        key = tuple(stack.rings(kind) for stack, kind in zip(self.stacks, kinds, strict=True))
        if key not in self._moving:
            made = [StackTick(stack, rings) for stack, rings in zip(self.stacks, key, strict=True)]
            self._moving[key] = made, wire(made)
        return self._moving.used(key)

    @property
    def _may_judge(self) -> bool:
        """Whether the last stage has a loss of torch's own. Another loss may compute something else at every call; a
        graph cannot.
        """
        stage = self.last
        return stage.stack is None and stage.random.state is None and stage.loss is not None and torchs(stage.loss)

    def _judge(self, x: Any, target: Any) -> LossStage | None:
        """Return the last stage as a graph, or None if it cannot be traced."""
        stage = self.last
        assert stage.loss is not None
        key = form(x, target), stage.module.training, listened(stage.module)
        if key[0] is None or not any(floating(v.dtype) for v in leaves(x)):
            return None
        if key not in self._judges:
            self._judges[key] = None
            try:
                clones = check_plain([stage], x).clones
                graph = capture_loss_stage(stage.module, stage.loss, x, target, clones=clones)
                judged_alike(stage, graph, x, target)
                self._judge_rows = self._judge_rows or Rows([stage])
                self._judges[key] = LossStage(stage, graph, self._judge_rows, x, target, check=self.worker.check_finite)
            except Unfit:
                pass
        return self._judges.used(key)

    def _tick(
        self, compile: Compile, moving: Sequence[StackTick], judge: LossStage | None, steps: Sequence[Step | AdamStep]
    ) -> Any:
        """Return a compiled tick with such steps. It does not check its arguments; this function does."""
        rooms = [(one, one.rings.length) for one in moving]
        key = (*rooms, judge, *(step.form for step in steps), *_numerics())
        if key not in self._fused:
            self._fused[key] = fused(moving, judge, steps, compile)
        return self._fused.used(key)


def _numerics() -> tuple[Any, ...]:
    """Return the global settings of torch that compiled code depends on."""
    return (
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
