"""Worker: a worker that runs each stack of stages as one, and all other stages one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.methods.base import Method
from pipeback.runtime.link import Name
from pipeback.runtime.worker import Worker
from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Ops, Order
from pipeback.schedules.programs import Flowing
from pipeback.schedules.timeline import in_flight
from pipeback.splitting.module_restore import untouched
from pipeback.stages import compiled
from pipeback.stages.flight import Flight
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.layout import Message
from pipeback.vectorized.capture import Unfit, signature
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.eligible import leaps
from pipeback.vectorized.stack import Stack
from pipeback.vectorized.steady import Steady

LEAST = 2  # the fewest stages of a stack
# the speed-up of F and B from which "auto" runs stages as one where ticks are interpreted stage by stage: it covers the
# overhead, which is larger where only every second stage is busy at a tick (`pipeback bench auto` measures it)
ALL, SOME, SPARSE = 2.0, 5.0, 1.4  # with fewer than SPARSE ticks per micro-batch ALL holds, otherwise SOME
WHOLE = 1.2  # the same where a tick is one function: a small stack gains little, and its gain is measured roughly


def alike(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Return runs of neighbouring stages that look alike and have weights, without the stage with the loss."""
    found: list[list[Stage]] = []
    kinds: list[Any] = []
    for stage in stages:
        kind = None if stage.judges or not stage.params else signature(stage.module)
        if kinds and kind is not None and kind == kinds[-1]:
            found[-1].append(stage)
        else:
            found.append([stage])
        kinds.append(kind)
    return [run for run in found if len(run) >= LEAST]


def stacked(
    stages: Sequence[Stage], method: Method, compile: bool | dict[str, Any], vectorize: bool | str
) -> list[Stack]:
    """Return stacks of the stages that look alike (none without `vectorize`); `learn` finds out whether they are.

    Raises ValueError where `vectorize` demands a stack and there is none, and for CUDA graphs without CUDA.
    """
    if not vectorize:
        return []
    if vectorize == "cuda_graph" and any(s.device is not None and s.device.type != "cuda" for s in stages):
        raise ValueError('vectorize="cuda_graph" needs all stages on a CUDA device; move the model, or use True')
    flying = in_flight(method.schedule, len(stages))
    stacks: list[Stack] = []
    turns = method.schedule.turns if isinstance(method.schedule, Flowing) else 1
    for run in alike(stages):
        mine = []
        for some in (run[::2], run[1::2]) if turns == 2 else (run,):
            options = compiled.options(compile, keep=False) if compile else None
            stack = Stack(some, max(flying[stage.index] for stage in some) + 1, options)
            stack.leaps = leaps(method)
            if vectorize == "cuda_graph":
                stack.fuse = CudaGraphed if stack.fuse is None else partial(_graphed, stack.fuse)
            for stage in some:  # the stack is compiled, not its stages
                stage.join(stack)
            mine.append(stack)
        if turns == 2:
            mine[0].partner, mine[1].partner = mine[1], mine[0]
        stacks += mine
    if not stacks and vectorize != "auto":
        raise ValueError(
            f"vectorize={vectorize!r}: no neighbouring stages are alike (in layers, shapes, options; the last one has "
            'the loss); use vectorize="auto" or False'
        )
    return stacks


def _graphed(compile: Callable[[Any], Any], function: Any) -> CudaGraphed:
    return CudaGraphed(compile(function))


def learn(stages: Sequence[Stage], stacks: Sequence[Stack], x: Any) -> dict[str, str]:
    """Let the stacks make their graphs for micro-batches like x; return why stacks do not fit, by name."""
    found: dict[str, str] = {}
    firsts = {stack.first: stack for stack in stacks}
    value = x
    for stage in stages[: max((stack.last for stack in stacks), default=-1) + 1]:
        stack = firsts.get(stage.index)
        if stack is not None:
            try:
                stack.rings(stack.kind(value))
            except Unfit as error:
                found[stack.name] = str(error)
        with untouched(stage.module), accelerators.forked([stage.device]), torch.no_grad():
            value = stage.module(stage.enter(value)[1])
    return found


def calls(schedule: Schedule, stages: int, stack: Stack) -> float:
    """Return the number of ticks per micro-batch at which the stack is busy, in the steady state."""
    order, count = Order(schedule, stages, policy="skewed"), 0
    warm, last = 4 * stages, 8 * stages
    for arrived in range(1, last + 1):
        for kind, ops in order.advance(arrived):
            if arrived > warm and kind != "U" and any(s in stack.numbers for s, _ in ops):
                count += 1
    return count / 2 / (last - warm)


def fitting(
    stages: Sequence[Stage],
    stacks: Sequence[Stack],
    xs: Sequence[Any],
    method: Method,
    vectorize: bool | str,
    options: Options,
    worker: Mapping[str, Any],
    *,
    again: bool,
) -> tuple[list[Stack], dict[str, str]]:
    """Return the stacks that can and should run as one on micro-batches like these, and the findings, by name.

    The stages of the other stacks run one by one from then on. options: those of the optimizers. worker: its arguments.
    again: micro-batches of another form have come; stacks that they do not fit run their stages one by one on them.
    Raises ValueError where `vectorize` demands a stack and none can run as one.
    """
    reasons: dict[str, str] = {}
    for x in xs:
        reasons |= learn(stages, stacks, x)
    if again:
        return list(stacks), reasons
    for stack in stacks:  # of two partners both run as one, or none
        if stack.partner is not None and stack.partner.name in reasons:
            reasons.setdefault(stack.name, reasons[stack.partner.name])
    kept = [stack for stack in stacks if stack.name not in reasons]
    ticks = {stack.name: calls(method.schedule, len(stages), stack) for stack in kept}
    gains = {stack.name: stack.gain() / ticks[stack.name] for stack in kept}
    seen = any(worker.get(name) for name in ("clip_norm", "clip_value", "samples"))
    leap = leaps(method) and not seen and all(stack.rows.plain([options] * len(stack.stages)) for stack in kept)
    for stack in list(kept):
        times = min(gains[stack.name], gains[(stack.partner or stack).name])
        reasons[stack.name] = f"as one, which makes F and B {times:.1f} times as fast"
        full = stack.partner is None and ticks[stack.name] < SPARSE
        enough = WHOLE if leap else ALL if full else SOME
        if vectorize == "auto" and times < enough:
            reasons[stack.name] = (
                f"stage by stage, because as one F and B are {times:.2f} times as fast, which pays from {enough:g} on "
                f"with these options and {method!r}"
            )
            kept.remove(stack)
    if not kept and vectorize != "auto":
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f'vectorize={vectorize!r}: no stages can run as one ({told}); use vectorize="auto" or False')
    for stack in stacks:
        stack.told = reasons
        if stack not in kept:
            for stage, call in zip(stack.stages, stack.calls, strict=True):
                stage.leave_stack(call)
    return kept, reasons


class VectorizedWorker(Worker):
    """A worker, some of whose stages are in `stacks`.

    F is the forward, B the backward, U the update, each of one micro-batch at one stage.
    """

    def __init__(self, stages: Sequence[Stage], *given: Any, stacks: Sequence[Stack], **named: Any) -> None:
        super().__init__(stages, *given, **named)
        self.stacks = list(stacks)
        self._of = {stage.index: stack for stack in stacks for stage in stack.stages}
        self._mixed = False  # whether some flights of stacked stages are autograd graphs, from a state
        self._steady: Steady | None = None
        self._others_apart, self._apart = self._apart, False

    def record(self, on: bool) -> None:
        if on:
            raise ValueError("record: stages that run as one cannot be measured apart; build it with vectorize=False")
        super().record(on)

    def leap(self, order: Order, ticks: int) -> int:
        """Do at once as many ticks as possible at which every stage does F, B and U; return their number.

        The order counts them.
        """
        seen = self.replicas or self.watch or self.tracing or self.began or self.samples
        if seen or self.clip_norm or self.clip_value or self._mixed or not self.stacks:
            return 0
        if self._steady is None:
            self._steady = Steady(self, self.judged, self.stacks)
        try:
            return self._steady.run(order, ticks)
        except BaseException:
            order.skip(self._steady.done)
            raise

    def judged(self, i: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch from the last stage."""
        if self.check_finite and not torch.isfinite(loss):
            raise StageError(self._bad_loss(i, loss))
        self.report(i, loss)

    def _forward(self, ops: Ops) -> list[Flight]:
        others = [op for op in ops if op[0] not in self._of]
        if others and not others[0][0]:  # what fails at the first stage fails before anything else of its tick is done
            super()._forward(others[:1])
            del others[0]
        for stack in self.stacks:
            every = [op for op in ops if self._of.get(op[0]) is stack]
            some = stack.as_one(every, self.link.box)
            if len(some) < len(every):
                others += [op for op in every if op not in some]
                self._mixed = True
            if some:
                try:
                    stack.forward(some, self.link)
                except Exception as error:
                    raise self._failed_rows("forward", stack, some, error) from error
                for s, i in some:
                    self.stages[s].flights[i].options = self.options[i]
                    if s == self._last:
                        del self.options[i]
        if others:
            super()._forward(others)
        return [self.stages[s].flights[i] for s, i in ops]

    def _backward(self, ops: Ops) -> None:
        others = [op for op in ops if op[0] not in self._of]
        for stack in self.stacks:
            some, graphs = [op for op in ops if self._of.get(op[0]) is stack], []
            if self._mixed:
                stack.take(self.link.box)
                graphs = [(s, i) for s, i in some if self.stages[s].flights[i].row is None]
                some = [op for op in some if op not in graphs]
                self._lend(stack, graphs)
                others += graphs
            if some:
                try:
                    stack.backward(some, self.link)
                except Exception as error:
                    raise self._failed_rows("backward", stack, some, error) from error
                if self.samples:
                    for s, i in some:
                        self._count(self.stages[s], i)
            if graphs:
                stack.rows.apart([stack.numbers.index(s) for s, _ in graphs])
        for some in [[op] for op in sorted(others)] if self._others_apart else [sorted(others)] if others else []:
            super()._backward(some)
        if self._mixed:
            for s, i in others:
                if s in self._of and s == self._of[s].first:
                    self._of[s].forget(i)
            self._look()

    def update(self, ops: Ops) -> None:
        """Do U of each (stage, micro-batch), for a whole stack at once if only the optimizer moves the weights."""
        plain = not (self._update_hook or self.stash or self.watch or self.clip_norm or self.clip_value)
        there = {s for s, _ in ops}
        done: set[int] = set()
        for stack in self.stacks:
            if plain and there.issuperset(stack.numbers) and stack.rows.step():
                done.update(stack.numbers)
                for stage in stack.stages:
                    stage.updated()
            else:
                stack.rows.spread()
        rest = [op for op in ops if op[0] not in done]
        return super().update(rest) if rest else None

    def settle(self, stage: int | None = None) -> None:
        for stack in self.stacks:
            stack.rows.spread()
        super().settle(stage)

    def _lend(self, stack: Stack, ops: Ops) -> None:
        """Pass gradients from rows of the stack to stages whose flight is an autograd graph."""
        for s, i in ops:
            name = ("B", s, i)
            if name not in self.link.box:
                value = stack.waiting(name)
                assert value is not None
                self.link.box[name] = value

    # -- states --------------------------------------------------------------------------------------------------

    def between(self, order: Order) -> dict[Name, Message]:
        found: dict[Name, Message] = {}
        for stack in self.stacks:
            for s in range(stack.first, stack.last + 1):
                came = range(order.forwards[s], order.forwards[s - 1]) if s > stack.first else ()
                back = range(order.backwards[s], order.backwards[s + 1]) if s < stack.last else ()
                for kind, mbs in (("F", came), ("B", back)):
                    for mb in mbs:
                        name = (kind, s, order.start + mb)
                        value = None if name in self.link.box else stack.waiting(name)
                        if value is not None:
                            found[name] = value
        return found

    def take_up(self) -> None:
        self._look()
        for stack in self.stacks:
            stack.take(self.link.box)

    def leave(self, stacks: Sequence[Stack]) -> None:
        self.stacks = [stack for stack in self.stacks if stack not in stacks]
        self._of = {stage.index: stack for stack in self.stacks for stage in stack.stages}
        self._steady = None

    def _look(self) -> None:
        some = (self.stages[s] for s in self._of)
        self._mixed = any(flight.row is None for stage in some for flight in stage.flights.values())

    def _failed_rows(self, what: str, stack: Stack, ops: Ops, error: Exception) -> StageError:
        mbs = ", ".join(str(i) for _, i in ops)
        return StageError(f"{stack.name}, micro-batches {mbs}: the {what} failed: {error}")
