"""Steady: chooses how ticks are run at which stages do F (forward), B (backward) and U (update) of one micro-batch
each: which stages run as one, whether the last stage with its loss is a graph, and whether the whole tick is compiled.
A `SteadyRun` runs them.
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
from pipeback.schedules.spans import TickSpan, TurnSpan
from pipeback.stages.tracing_lock import TRACING
from pipeback.stages.trained_weights import frozen
from pipeback.tensors.copies import to_device
from pipeback.vectorized.buffers.version_ring import EntryVersions
from pipeback.vectorized.buffers.waiting import Waiting
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.making.graph_maker import Compile
from pipeback.vectorized.making.side_effects import check_plain, traced
from pipeback.vectorized.making.verify import judged_alike
from pipeback.vectorized.stacks.eligible import leaps, torchs
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.steps.asked_steps import AskedSteps
from pipeback.vectorized.steps.row_clipping import RowClipping
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_plan import StepPlan
from pipeback.vectorized.ticks.fused_tick import fused
from pipeback.vectorized.ticks.in_turn import Ends, InTurn
from pipeback.vectorized.ticks.in_turn_run import InTurnRun
from pipeback.vectorized.ticks.loss_stage import LossStage, form
from pipeback.vectorized.ticks.output_stage import OutputStage
from pipeback.vectorized.ticks.steady_run import SteadyRun
from pipeback.vectorized.ticks.tick import StackTick
from pipeback.vectorized.ticks.updates_by_group import UpdatesByGroup
from pipeback.vectorized.ticks.wiring import Where, wire
from pipeback.vectorized.tracing.capture import Unfit, capture_loss_stage
from pipeback.vectorized.tracing.forms import Kind, floating, leaves

Rings = tuple[Waiting, ...]


class Steady:
    """Runs such ticks for a worker with `stacks`. judged: is called with every micro-batch and its loss."""

    def __init__(self, worker: Worker, judged: Callable[[int, Tensor], None], stacks: Sequence[Stack]) -> None:
        self.worker, self.judged, self.stacks = worker, judged, list(stacks)
        schedule = worker.method.schedule
        whole = leaps(worker.method) and not any(stack.plan.masters for stack in stacks)
        self.turns = schedule.turns if whole and isinstance(schedule, Flowing) else 0
        self.every = schedule.every if isinstance(schedule, Flowing) else 1
        self.plain = self.every > 1 or worker.method.needs_entry  # whether no tick is compiled
        self.last = worker.stages[worker.last]
        self._run: SteadyRun | None = None
        self._mode: Any = None  # what the last stage's graph relies on, when the run began
        self._seen = False  # whether nobody can have changed that since
        self._undecided = False  # whether there was no input yet to make that graph for
        self._asked = AskedSteps(worker)
        self._moving: BoundedCache[Rings, tuple[list[StackTick], Where]] = BoundedCache()
        self._judges: BoundedCache[Any, LossStage | OutputStage | None] = BoundedCache()
        self._plan: StepPlan | None = None  # of the last stage
        self._in_turn: InTurnRun | None = None  # the turns of the run, where micro-batches take turns
        self._given: BoundedCache[Rings, Any] = BoundedCache()  # inputs of the last stage, by what its stacks are given
        self._fused: BoundedCache[tuple[Any, ...], Any] = (
            BoundedCache()
        )  # by the stacks, the stage with the loss, and the form of the steps

    def run(self, order: Order, span: TickSpan) -> int:
        """Run as many ticks of a span as possible, and return their number."""
        compile = self.stacks[0].maker.fuse
        every = range(span.stages.start % span.stages.step, self.worker.count, span.stages.step)
        if not self.turns or (compile is not None and (self.plain or len(span.stages) < len(every))):
            return 0
        run = self._going(order, in_turn=False)
        if run is None:
            return 0
        done: list[None] = []
        try:
            some = span._replace(ticks=1) if self._undecided else span
            run.go(some, None if compile is None else partial(self._tick, compile), done)
        except BaseException:
            self.finish()
            order.skip(span, len(done))
            raise
        return len(done)

    def run_in_turn(self, order: Order, span: TurnSpan) -> int:
        """Run as many of these micro-batches as possible in turn, and return their number."""
        done: list[None] = []
        try:
            if self._turns(order) and self._in_turn is not None:
                self._in_turn.go(span._replace(ticks=1) if self._undecided else span, done)
                self._note(self._in_turn.key, self._in_turn.given)
        except BaseException:
            self.finish()
            order.skip(span, len(done))
            raise
        return len(done)

    def begin_turn(self, order: Order) -> bool:
        """Do all forwards of the next micro-batch, whose loss is computed outside; return whether that was possible.
        Then `run_in_turn` does the rest.
        """
        return self._turns(order) and self._in_turn is not None and self._in_turn.begin(outside=True)

    @property
    def begun(self) -> bool:
        """Whether the loss of a micro-batch is computed outside now."""
        return self._in_turn is not None and self._in_turn.begun

    def _turns(self, order: Order) -> bool:
        """Whether micro-batches can take turns."""
        if self.begun:
            return True
        alone = len(self.worker.stages) == self.worker.count
        if not self.turns or not alone or self.stacks[0].maker.fuse is not None:
            return False
        return self._going(order, in_turn=True) is not None

    def _going(self, order: Order, *, in_turn: bool) -> SteadyRun | None:
        """Return the run that goes on, or a new one; None where none can be."""
        run = self._run
        if run is not None:
            other = (self._in_turn is not None) != in_turn
            if other or run.long or run.parted or self._undecided or self._outdated():
                self.finish()
        if self._run is None:
            with TRACING:
                self._run = self._begin(order, in_turn=in_turn)
        return self._run

    def look(self) -> None:
        """Note that micro-batches may have come, and that the user may have changed optimizers or their state."""
        self._seen = False
        if self._run is not None:
            self._run.look()

    def _outdated(self) -> bool:
        """Whether the last stage may compute something else than when the run began."""
        seen, self._seen = self._seen, True
        return not seen and self._mode != self._modes()

    def finish(self) -> None:
        """Bring flights, versions, options and the ledger up to date, before others look at them."""
        run, self._run, self._in_turn = self._run, None, None
        if run is not None:
            for stack in self.stacks:
                stack.leaps = bool(run.turns[0].steps)
            run.finish()

    def _begin(self, order: Order, *, in_turn: bool) -> SteadyRun | None:
        ready, worker = self._ready(), self.worker
        if ready is None:
            return None
        forwards = [order.start + i for i in order.forwards]
        backwards = [order.start + i for i in order.backwards]
        line = self._line(*ready, (forwards, backwards)) if in_turn else None
        if in_turn and line is None:
            return None
        groups, turns = self._by_group(order.start) if self.every > 1 else None, 1 if in_turn else self.turns
        entered = EntryVersions(worker.start, worker.base, 3 - self.turns) if worker.method.needs_entry else None
        run = SteadyRun(worker, self.judged, self._asked, *ready, turns, forwards, backwards, groups, entered, line)
        judge, self._undecided, key = None, False, tuple(one.rings for one in ready[0])
        x = worker.link.box.get(("F", self.last.index, forwards[-1]), self._given.get(key))
        if self._may_judge and not self.plain:
            self._note(key, x)
            if x is None:
                self._undecided = True  # after one tick there is an input to make a graph for
            else:
                judge = self._judge(x, forwards[-1])
        self._mode = self._modes()
        run.take(judge, self._plan)
        run.begin()
        self._in_turn = None if line is None else InTurnRun(run, line, key, x)
        return run

    def _note(self, key: Rings, x: Any) -> None:
        """Note an input of the last stage, by what its stacks are given."""
        self._given[key] = x
        self._given.used(key)

    def _line(self, moving: Sequence[StackTick], where: Where, ends: Ends) -> InTurn | None:
        """Return what lets micro-batches take turns: all stages but the last are in stacks, which can do F by rows."""
        last = self.worker.last
        if len(where) < last or last in where or not all(one.divides() for one in moving):
            return None
        return InTurn(self.worker, moving, where, ends)

    def _by_group(self, start: int) -> UpdatesByGroup:
        """Return what makes the updates where they are of several micro-batches. start: the first micro-batch since the
        pipeline was empty.
        """
        begins: int = getattr(self.worker.method.schedule_at(start, 1), "begins", 0)  # after a warm-up
        return UpdatesByGroup(self.worker, self.stacks, self.every, 3 - self.turns, start + begins)

    def _ready(self) -> tuple[list[StackTick], Where] | None:
        kinds = [kind for stack in self.stacks if (kind := stack.one_kind) is not None]
        if len(kinds) < len(self.stacks) or any(map(_outdated, self.stacks, kinds)):
            return None
        key = tuple(stack.rings(kind) for stack, kind in zip(self.stacks, kinds, strict=True))
        if key not in self._moving:
            made = [
                StackTick(stack, rings, RowClipping(self.worker, stack.numbers))
                for stack, rings in zip(self.stacks, key, strict=True)
            ]
            self._moving[key] = made, wire(made)
        return self._moving.used(key)

    @property
    def _may_judge(self) -> bool:
        """Whether the last stage has a loss of torch's own, or none. Another loss may compute something else at every
        call; a graph cannot.
        """
        stage = self.last
        plain = stage.last and stage.stack is None and stage.random.state is None and not frozen([stage])
        if stage.loss is None:
            return plain and stage.keeping is None and self.stacks[0].maker.fuse is None
        return plain and torchs(stage.loss)

    def _modes(self) -> tuple[Any, ...]:
        return self.last.module.training, listened(self.last.module), self.last.learnt.casts, *frozen([self.last])

    def _judge(self, x: Any, i: int) -> LossStage | OutputStage | None:
        """Return the last stage as a graph, or None if it cannot be traced. x: its input, of micro-batch i."""
        stage = self.last
        target = [to_device(stage.device, self.worker.link.box["Y", stage.index, i])] if stage.judges else []
        key = form(x, *target), *self._modes()
        if key[0] is None or not any(floating(v.dtype) for v in leaves(x)):
            return None
        if key not in self._judges:
            self._judges[key] = None
            try:
                self._plan = self._plan or StepPlan(Rows([stage]))
                self._judges[key] = self._as_graph(self._plan.rows, x, *target)
            except Unfit:
                pass
        return self._judges.used(key)

    def _as_graph(self, rows: Rows, x: Any, *target: Any) -> LossStage | OutputStage:
        stage = self.last
        if stage.loss is None:
            return OutputStage(stage, rows, x)
        clones = check_plain([stage], x).clones
        with traced(stage.module):
            graph = capture_loss_stage(stage.module, stage.loss, x, *target, clones=clones, casts=stage.learnt.casts)
        judged_alike(stage, graph, x, *target)
        return LossStage(stage, graph, rows, x, *target, check=self.worker.check_finite)

    def _tick(
        self, compile: Compile, moving: Sequence[StackTick], judge: LossStage | None, steps: Sequence[AnyStep]
    ) -> Any:
        """Return a compiled tick with such steps. It does not check its arguments; this function does."""
        rooms = [(one, one.rings.length) for one in moving]
        key = (*rooms, judge, *(step.form for step in steps), *_numerics())
        if key not in self._fused:
            with TRACING:
                self._fused[key] = fused(moving, judge, steps, compile)
        return self._fused.used(key)


def _outdated(stack: Stack, kind: Kind) -> bool:
    """Whether micro-batches of this kind come no more."""
    return (kind.mode, kind.casts) != (stack.mode, stack.stages[0].learnt.casts)


def _numerics() -> tuple[Any, ...]:
    """Return the global settings of torch that compiled code depends on."""
    return (
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
