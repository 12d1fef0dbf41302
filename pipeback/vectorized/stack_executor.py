"""Stack executor: does a worker's operations, those of each stack of stages as one and all others stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.errors import RankError, StageError
from pipeback.runtime.executor import JoinedOperations, SplitOperations
from pipeback.runtime.link import Closed
from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.flushes import FlushSpan
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Ops, Order
from pipeback.schedules.spans import Span, TickSpan
from pipeback.stages.flight import Flight
from pipeback.vectorized.flushes.whole_flush import WholeFlush, able
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.ticks.steady import Steady

INTERRUPTED = Closed, ConnectionError, RankError  # what ends a wait for a message: nothing has failed in these stages


class StackExecutor:
    """The executor of the stages of `worker`, some of which are in `stacks`.

    F is the forward, B the backward, U the update, each of one micro-batch at one stage.
    """

    apart = False  # the backwards of a wave are one call
    undoes = False  # nothing puts the rows of a stack back
    as_one = True  # the operations of a wave are one call
    split: SplitOperations | None = None
    joined: JoinedOperations | None = None
    whole = "stages of its worker run as one"

    def __init__(self, worker: Worker, *, stacks: Sequence[Stack]) -> None:
        self.worker, self.stages, self.link, self.stacks = worker, worker.stages, worker.link, list(stacks)
        self._one_by_one = StageExecutor(worker)  # for the other stages, and for flights that are autograd graphs
        self._of = {stage.index: stack for stack in stacks for stage in stack.stages}
        self._mixed = False  # whether some flights of stacked stages are autograd graphs, from a state
        self._steady: Steady | None = None
        self._whole: WholeFlush | None = None
        self.by_group = worker.residence.joins and able(worker)

    def record(self, on: bool) -> None:
        """Raise ValueError if operations are to be measured."""
        if on:
            raise ValueError("record: stages that run as one cannot be measured apart; build it with vectorize=False")

    def leap(self, order: Order, span: Span) -> int:
        """Do as many ticks of a span as possible without any work per stage, or a flush; return their number.

        The order counts them. `land` comes before anything else is done.
        """
        worker = self.worker
        if self._whole is not None and self._whole.begun:
            self._whole.end()
            return span.ticks
        if self._steady is not None and self._steady.begun:
            return self._steady.run_in_turn(order, span)  # type: ignore[arg-type]
        if self._watched or worker.early or not self.stacks or not worker.residence.joins:
            return 0
        if isinstance(span, FlushSpan):
            return self._flush(order, span)
        if (steady := self._leaps()) is None:
            return 0
        return steady.run(order, span) if isinstance(span, TickSpan) else steady.run_in_turn(order, span)

    def _leaps(self) -> Steady | None:
        """Return what does whole ticks; None if none can be done now."""
        worker = self.worker
        if worker.samples or self._mixed or (self._clips and self._clips_alone):
            return None
        if self._steady is None:
            self._steady = Steady(worker, self.judged, self.stacks)
        steady = self._steady
        return steady if steady.every > 1 or all(stack.plan.may_step for stack in self.stacks) else None

    @property
    def _clips(self) -> bool:
        return bool(self.worker.clip_norm or self.worker.clip_value)

    @property
    def _clips_alone(self) -> bool:
        """Whether a stage's gradients are clipped in an update of its own: no compiled tick does it, and no tick knows
        the norm of weights that other ranks have a part of.
        """
        homes = [stage.home for stack in self.stacks for stage in stack.stages]
        return self.stacks[0].maker.fuse is not None or any(home.share or home.shards for home in homes)

    def begin_turn(self, order: Order) -> bool:
        """Do all forwards of the newest micro-batch, whose loss is computed outside; return whether that was possible.
        The next `leap` does the rest.
        """
        if self._watched or not self.stacks or not self.worker.residence.joins:
            return False
        steady = self._leaps()
        return steady is not None and steady.begin_turn(order)

    def _flush(self, order: Order, span: FlushSpan) -> int:
        worker = self.worker
        first = order.start + order.updated[0]
        unjudged = worker.pauses and first + span.ticks == order.arrived  # the newest, later (`begin_flush`)
        if not self.by_group or unjudged:
            return 0
        self._flushing.run(first, span.ticks, worker.method.schedule_at(order.start, span.ticks))
        return span.ticks

    @property
    def _watched(self) -> bool:
        """Whether somebody looks at single operations."""
        worker = self.worker
        busy = worker.watch is not None and worker.watch.busy
        return bool(worker.replicas or busy or worker.tracing)

    @property
    def _flushing(self) -> WholeFlush:
        if self._whole is None:
            self._whole = WholeFlush(self.worker, self._one_by_one, self.stacks, self.judged)
        return self._whole

    def begin_flush(self, first: int, count: int, schedule: Schedule) -> bool:
        """Do all forwards of a flush, and its backwards but those for which a gradient is still to come from outside;
        the next `leap` ends it. Returns whether that was possible.
        """
        if not self.by_group or self._watched or not self.stacks:
            return False
        self._flushing.begin(first, count, schedule, pauses=True)
        return True

    def land(self) -> None:
        """Let stages and worker know of the ticks that were leapt."""
        if self._steady is not None:
            self._steady.finish()

    def look(self) -> None:
        """Note that micro-batches may have come, and that the user may have changed optimizers or their state."""
        if self._steady is not None:
            self._steady.look()

    def judged(self, i: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch from the last stage."""
        if self.worker.check_finite and not torch.isfinite(loss):
            raise self._one_by_one.bad_loss(i, loss)
        self.worker.report(i, loss)

    def forward(self, ops: Ops) -> list[Flight]:
        """Do F of each (stage, micro-batch), of stacks first; return the new flights."""
        options = self.worker.options
        if ops[0][0] == self.worker.first:
            self.link.wait("F", *ops[0])  # from another worker
        others = [op for op in ops if op[0] not in self._of]
        if others and not others[0][0]:  # what fails at the first stage fails before anything else of its tick is done
            self._one_by_one.forward(others[:1])
            del others[0]
        for stack, every in self._by_stack(ops):
            some = stack.as_one(every, self.link.box)
            if len(some) < len(every):
                others += [op for op in every if op not in some]
                self._mixed = True
            if some:
                try:
                    stack.forward(some, self.link)
                except INTERRUPTED:
                    raise
                except Exception as error:
                    raise self._failed_rows("forward", stack, some, error) from error
                for s, i in some:
                    self.stages[s].flights[i].options = options[i]
                    if s == self.worker.last:
                        del options[i]
        if others:
            self._one_by_one.forward(others)
        return [self.stages[s].flights[i] for s, i in ops]

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch), of stacks first."""
        others = [op for op in ops if op[0] not in self._of]
        for stack, some in self._by_stack(ops):
            graphs: list[tuple[int, int]] = []
            if self._mixed:
                graphs = [(s, i) for s, i in some if self.stages[s].flights[i].row is None]
                some = [op for op in some if op not in graphs]
                others += graphs
            if some:
                try:
                    stack.backward(some, self.link)
                except INTERRUPTED:
                    raise
                except Exception as error:
                    raise self._failed_rows("backward", stack, some, error) from error
                if self.worker.samples:
                    for s, i in some:
                        self._one_by_one.weigh(self.stages[s], i)
            if graphs:
                stack.sums.apart([stack.numbers.index(s) for s, _ in graphs])
        apart = self._one_by_one.apart
        for some in [[op] for op in sorted(others)] if apart else [sorted(others)] if others else []:
            self._one_by_one.backward(some)
        if self._mixed:
            for s, i in others:
                if s in self._of and s == self._of[s].first:
                    self._of[s].forget(i)
            self._look()

    def update(self, ops: Ops) -> Ops:
        """Do U of each whole stack if only the optimizer moves the weights; return the operations that are left."""
        worker = self.worker
        watched = worker.watch is not None and worker.watch.busy
        plain = not (worker.update_hook or worker.stash or watched or self._clips)
        plain = plain and worker.residence.joins  # else the store steps them
        there = {s for s, _ in ops}
        done: set[int] = set()
        for stack, _ in self._by_stack(ops):
            if plain and there.issuperset(stack.numbers) and stack.sums.step():
                done.update(stack.numbers)
                for stage in stack.stages:
                    stage.updated()
            else:
                stack.sums.spread()
        return [op for op in ops if op[0] not in done]

    def _by_stack(self, ops: Ops) -> list[tuple[Stack, list[tuple[int, int]]]]:
        """Return those of the operations that are of stacked stages, by stack."""
        found: dict[int, tuple[Stack, list[tuple[int, int]]]] = {}
        for op in ops:
            stack = self._of.get(op[0])
            if stack is not None:
                found.setdefault(id(stack), (stack, []))[1].append(op)
        return list(found.values())

    def spread(self) -> None:
        """Hand the stages of each stack their gradients."""
        for stack in self.stacks:
            stack.sums.spread()

    # -- states --------------------------------------------------------------------------------------------------

    def take_up(self) -> None:
        """Go on after a state was put into the stages, and messages into the link."""
        self._look()

    def use(self, stacks: Sequence[Stack]) -> None:
        """Run the stages of these stacks as one from now on, and all others one by one."""
        self.land()
        self.stacks = list(stacks)
        self._of = {stage.index: stack for stack in self.stacks for stage in stack.stages}
        self._steady = self._whole = None

    def _look(self) -> None:
        some = (self.stages[s] for s in self._of)
        self._mixed = any(flight.row is None for stage in some for flight in stage.flights.values())

    def _failed_rows(self, what: str, stack: Stack, ops: Ops, error: Exception) -> StageError:
        mbs = ", ".join(str(i) for _, i in ops)
        s, i = ops[0] if len(ops) == 1 else (None, None)
        return StageError(f"{stack.name}, micro-batches {mbs}: the {what} failed: {error}", what, s, i)
