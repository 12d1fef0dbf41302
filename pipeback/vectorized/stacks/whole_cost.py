"""Whole cost: times what a micro-batch costs at the stages of a stack: its forward (F), its backward (B) and the update
(U), with all that the method does around them.

In the event loop a worker does the operations of understudies of the stages; as one, an `EagerTick` does those of their
rows. Both compute with made-up numbers. As many micro-batches are in flight as in training, up to a number that is soon
done or fills the caches: what waits for its B has left them by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.runtime.link import LocalLink
from pipeback.runtime.stage_executor import StageExecutor
from pipeback.runtime.worker import Worker
from pipeback.schedules.timeline import in_flight
from pipeback.stages.contiguous import lay_contiguously
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.vectorized.making.timing import channels_last, gradients, seconds
from pipeback.vectorized.making.verify import examples, row
from pipeback.vectorized.stacks.eager_tick import EagerTick, WaitingRoom, steps_together
from pipeback.vectorized.stacks.stack import Stack
from pipeback.vectorized.stacks.understudies import understudies
from pipeback.vectorized.steps.asked_steps import AskedSteps
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.row_clipping import RowClipping
from pipeback.vectorized.steps.rows import Rows
from pipeback.vectorized.steps.step_plan import StepPlan
from pipeback.vectorized.tracing.forms import packed
from pipeback.vectorized.tracing.graphs import Graphs, direct
from pipeback.vectorized.tracing.product_gradients import accumulating

LATER = 1 << 30  # the first micro-batch: warm-ups are over
CACHES = 64 << 20  # bytes that no cache holds
BEFORE = 256  # forwards of single stages that are done, at most, before anything is timed


class Conditions(NamedTuple):
    """Under which stages train. delays: D of every stage of the pipeline. clip: bounds on gradients."""

    method: Method
    delays: Sequence[int]
    options: Options
    clip: tuple[float | None, float | None] = (None, None)


def gain(stack: Stack, under: Conditions, *, whole: bool) -> float:
    """Return the speed-up as one over the event loop. whole: with U; else, and with a compiler, of F and B alone."""
    if not whole or not stack.maker.plain or under.method.needs_entry:
        return stack.gain()
    rows = _Rows(stack, under)
    loop = _EventLoop(stack, under, rows.flying)
    loop_seconds, row_seconds = seconds([loop, lambda: _at_once([rows])], stack.sample.device)
    return loop_seconds / row_seconds


def faster_apart(stack: Stack, under: Conditions, by: float) -> bool:
    """Return whether each stage as a graph of its own is faster, by a factor, than all as one. Raises `Unfit` where the
    stages turn out to have no graphs of their own, as those of a forward that computes now this, now that.
    """
    found = stack.maker.single(stack.known)
    if found is None or under.method.needs_entry:
        return False
    graphs, last = found.rings.written, found.way.last
    apart = [_Rows(stack, under, [stage], graphs, last=last) for stage in stack.stages]
    rows = _Rows(stack, under)
    times = seconds([lambda: _at_once(apart), lambda: _at_once([rows])], stack.sample.device)
    return times[0] * by < times[1]


def _at_once(parts: Sequence[_Rows]) -> None:
    """Do a tick of all these rows."""
    joint = JointStep()
    with torch.no_grad():
        for part in parts:
            part.tick(joint)
        joint.make()


def _worker(stages: Sequence[Stage], under: Conditions) -> Worker:
    norm, value = under.clip
    return Worker(stages, under.method, under.delays, LocalLink(), StageExecutor, clip_norm=norm, clip_value=value)


class _EventLoop:
    """The stages of a stack one by one. A call does F of a micro-batch, B of one before, and U. flying: how many are in
    flight.
    """

    def __init__(self, stack: Stack, under: Conditions, flying: int) -> None:
        kind, graphs, n = stack.known, stack.sample.written, len(stack.stages)
        self._options, self._mb = under.options, LATER
        self.stages = understudies(stack.stages, under.method, under.options)
        for stage in self.stages if stack.maker.way.last else ():
            for p in stage.module.parameters():
                p.data = p.data.contiguous()  # inputs come as they are
            stage.moved()
        lay_contiguously(self.stages)
        self.worker = _worker(self.stages, under)
        xs = examples(kind, n, stack.sample.device)
        with torch.no_grad():
            gs = gradients(graphs, stack.rows.weights, xs)
        self._given = [packed(row(xs, r, n), kind.packed) for r in range(n)]
        self._back = [
            packed([g if m in graphs.gives else None for m, g in enumerate(row(gs, r, n))], graphs.packs)
            for r in range(n)
        ]
        self._flying = flying
        for _ in range(flying):
            self._forward()
            self._mb += 1

    def _forward(self) -> None:
        worker, i = self.worker, self._mb
        worker.options[i] = self._options
        for stage, x in zip(self.stages, self._given, strict=True):
            worker.link.box["F", stage.index, i] = x
            worker.forward([(stage.index, i)])
            worker.options[i] = self._options

    def __call__(self) -> None:
        self._forward()
        worker, i = self.worker, self._mb - self._flying
        self._mb += 1
        for stage, g in zip(self.stages, self._back, strict=True):
            worker.link.box["B", stage.index, i] = g
        worker.backward([(stage.index, i) for stage in self.stages])
        worker.update([(stage.index, i) for stage in self.stages])
        worker.link.box.clear()
        worker.options.clear()


class _Rows:
    """Stages of a stack as rows, or one of them as a graph. graphs: those of so many rows. last: see `Way`."""

    def __init__(
        self, stack: Stack, under: Conditions, some: Sequence[Stage] = (), graphs: Graphs | None = None, *,
        last: bool | None = None,
    ) -> None:  # fmt: skip
        graphs, device = graphs or stack.sample.written, stack.sample.device
        stages = understudies(some or stack.stages, under.method, under.options)
        self._plan, self._several = StepPlan(Rows(stages)), len(stages) > 1
        rows = self._plan.rows
        if last is not None:
            rows.lay(channels_last if last else Tensor.contiguous)
        change = channels_last if (stack.maker.way.last if last is None else last) else Tensor.detach
        self._xs = [change(x) for x in examples(stack.known, len(stages), device)]
        with torch.no_grad():
            gs = [change(g) for g in gradients(graphs, rows.weights, self._xs)]
            self._gs = [gs[n] for n in graphs.gives]
            views = None if stack.sample.made is None else graphs.made(*rows.weights)
            saved: Sequence[Tensor] = graphs.forward(*rows.weights, *self._xs)[graphs.outputs :]
        most = in_flight(under.method.schedule, len(under.delays))[stages[0].index]
        kept = [*saved, *(rows.stepped if under.method.copies == "stash" else ())]
        enough = 1 + CACHES // max(1, sum(t.nbytes for t in kept))
        self.flying = min(most, enough, max(1, BEFORE // len(stages)))
        self._left = deque[Sequence[Tensor]]([t.clone() for t in saved] for _ in range(self.flying))
        accumulate = direct(accumulating(graphs, len(rows.weights), rows.whole.trained))
        self._worker = _worker(stages, under)
        clipping = RowClipping(self._worker, [stage.index for stage in stages])
        self._eager = EagerTick(
            rows.whole, graphs.each(direct), accumulate, clipping, str,
            together=steps_together(graphs, rows.whole), views=views,
        )  # fmt: skip
        self._asked, self._options = AskedSteps(self._worker), [under.options] * len(stages)
        name = self._asked.along
        self._drift = rows.state(name) if name in stages[0].state else []
        self._before = list(map(torch.empty_like, self._drift))
        self._used = list(map(torch.clone, rows.stepped)) if self._worker.stash else []

    def tick(self, joint: JointStep) -> None:
        """Do F, B and U, or leave U to the joint step."""
        step = self._asked.step(self._plan, self._options, self._options, 0)
        assert step is not None  # else whole ticks would be ruled out
        keep, used = (self._keep, self._with_used) if self._used else (None, None)
        room = WaitingRoom(lambda b: self._left[0], self._put, keep, used)
        self._eager.run(
            0, 0, self._xs, lambda: self._gs, step, joint, room, _nowhere, self._drift, self._before,
        )  # fmt: skip

    def _put(self, f: int, saved: Sequence[Tensor]) -> None:
        left = self._left.popleft()
        if self._several:  # as into rings
            for place, tensor in zip(left, saved, strict=True):
                place.copy_(tensor)
        self._left.append(left if self._several else saved)

    def _keep(self, f: int, shifted: Sequence[Tensor] | None) -> None:
        torch._foreach_copy_(self._used, list(self._plan.rows.stepped if shifted is None else shifted))

    def _with_used(self, b: int) -> list[Tensor]:
        found = list(self._plan.rows.weights)
        for n, w in zip(self._plan.rows.trained, self._used, strict=True):
            found[n] = w
        return found


def _nowhere(kind: Literal["F", "B"], value: list[Any]) -> None:
    """Send nothing."""
