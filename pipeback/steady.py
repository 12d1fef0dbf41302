"""Steady: runs of ticks at which every stage does F, B and U of one micro-batch each, without a look at single stages.

The order, flights, versions and the ledger are brought up to date when a run is over; nobody can see them before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeback.adaptive import Adaptive
from pipeback.capture import Unfit, judged
from pipeback.joint import Options
from pipeback.method import HOOKS, Correction, Method, described, overrides
from pipeback.momentum import velocity
from pipeback.order import Order
from pipeback.proof import check_plain, judged_alike
from pipeback.rings import Kind
from pipeback.rows import Rows, Step
from pipeback.schedules import Flowing
from pipeback.stack import Compile, Stack
from pipeback.stage import Flight
from pipeback.team import Team
from pipeback.tick import Judge, Moving, form, fused

if TYPE_CHECKING:
    from pipeback.vectorized import Vectorized


class Steady:
    """Of a worker with `stacks`."""

    def __init__(self, worker: Vectorized, stacks: Sequence[Stack]) -> None:
        self.worker, self.stacks = worker, list(stacks)
        self.plain = leaps(worker.method)
        self.last = worker.stages[worker.count - 1]
        self._moving: dict[tuple[Kind, ...], list[Moving]] = {}
        self._judges: dict[Any, Judge | None] = {}
        self._judge_rows: Rows | None = None
        self._fused: dict[tuple[Any, ...], Any] = {}  # by what is moved, who judges, and how it is stepped

    def run(self, order: Order, ticks: int) -> int:
        """Do as many of the next `ticks` ticks as can be done so, and return their number."""
        moving = self._ready() if self.plain else None
        if moving is None:
            return 0
        forwards = [order.start + i for i in order.forwards]
        backwards = [order.start + i for i in order.backwards]
        options = {i: f.options for i, f in self.worker.stages[0].flights.items()} | self.worker.options
        run = Run(self.worker, moving, forwards, backwards, options)
        run.take(self._judge(forwards[-1]))
        compile = self.stacks[0].fuse
        if compile is not None and self.last.device != torch.device("cpu") and run.adapts():
            for stack in self.stacks:
                stack.leaps = False
            return 0
        run.begin()
        try:
            return run.ticks(ticks, None if compile is None else partial(self._tick, compile, moving, run.judge))
        finally:
            run.told()
            for stack in self.stacks:
                stack.leaps = bool(run.steps)

    def _ready(self) -> list[Moving] | None:
        kinds = tuple(stack.one_kind for stack in self.stacks)
        if None in kinds:
            return None
        key: Any = kinds
        if key not in self._moving:
            self._moving[key] = [Moving(stack, kind) for stack, kind in zip(self.stacks, key, strict=True)]
        return self._moving[key]

    def _judge(self, mb: int) -> Judge | None:
        """The last stage as a graph, if it has a loss of torch's own, and one that can be written so.

        What another loss computes may change from call to call, which a graph would not.
        """
        stage, box = self.last, self.worker.link.box
        if stage.loss is None or stage.stack is not None or stage.stream is not None or not torchs(stage.loss):
            return None
        x, target = box[("F", stage.index, mb)], box[("Y", stage.index, mb)]
        key = form(x, target), stage.module.training
        if key[0] is None or not x.is_floating_point():
            return None
        if key not in self._judges:
            self._judges[key] = None
            try:
                check_plain([stage], x)
                graph = judged(stage.module, stage.loss, x, target)
                judged_alike(stage, graph, x, target)
                self._judge_rows = self._judge_rows or Rows([stage])
                self._judges[key] = Judge(stage, graph, self._judge_rows, x, target, check=self.worker.check_finite)
            except Unfit:
                pass
        return self._judges[key]

    def _tick(
        self, compile: Compile, moving: Sequence[Moving], judge: Judge | None, steps: Sequence[Step | Adaptive]
    ) -> Any:
        """What a compiler makes of a tick with such steps. It need not look at what it is given: this does."""
        rooms = [(id(one), one.rings.length) for one in moving]
        key = (*rooms, id(judge), *(step.form for step in steps), *_numerics())
        if key not in self._fused:
            self._fused[key] = fused(moving, judge, steps, compile)
        return self._fused[key]


def _numerics() -> tuple[Any, ...]:
    """What is set for all of torch, and is compiled in."""
    return (
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


class Run:
    """Some ticks. forwards, backwards: the micro-batches that every stage takes next."""

    def __init__(
        self,
        worker: Vectorized,
        moving: Sequence[Moving],
        forwards: Sequence[int],
        backwards: Sequence[int],
        options: dict[int, Options],
    ) -> None:
        self.worker, self.moving, self.f, self.b, self.options = worker, moving, forwards, backwards, options
        self.done = 0
        first = next(iter(options.values()))
        self.uniform = all(some is first for some in options.values())
        self.corrects = any(overrides(worker.method, hook) for hook in HOOKS)
        self.steps: list[Step | Adaptive] = []

    def take(self, judge: Judge | None) -> None:
        """Have the last stage be this graph, if its F and B run on the same weights."""
        step = None if judge is None else self._step(judge.rows, 0)
        self.judge = judge if step is None or not step.ahead else None
        inside = {s for one in self.moving for s in one.stack.numbers}
        if self.judge is not None:
            inside.add(self.judge.stage.index)
        self.others = [s for s in self.worker.stages if s not in inside]
        self.inside = sorted(inside)

    def adapts(self) -> bool:
        """Whether a step counts its updates, which Adam does in host memory."""
        return any(isinstance(step, Adaptive) for step in self._steps(0) or ())

    def begin(self) -> None:
        with torch.no_grad():
            for one in self.moving:
                one.begin(self.f[one.stack.first], self.b[one.stack.first])
            for rows, step in zip(self._rows(), self._steps(0) or (), strict=False):
                rows.kept(step)
                rows.alone = True

    def ticks(self, most: int, compiled: Callable[[Sequence[Step | Adaptive]], Any] | None) -> int:
        """Do so many, or fewer where a micro-batch or options come that need another look. compiled: gives what a
        compiler has made of a tick.
        """
        worker, moving, judge = self.worker, self.moving, self.judge
        box, parts = worker.link.box, [(one, one.stack.first, one.stack.last) for one in moving]
        last = worker.count - 1
        f, b = self.f, self.b
        known, fused = None, None
        for k in range(most):
            steps = self._steps(k)
            if steps is None or not self._fits(box, k):
                break
            if compiled is not None and steps is not known:
                known, fused = steps, compiled(steps)
            if self.others:
                worker.forward([(s, f[s] + k) for s in self.others])
            given = [(box.pop(("F", first, f[first] + k)), box.pop(("B", end, b[end] + k))) for _, first, end in parts]
            if judge is not None:
                i = f[last] + k
                x, target = box.pop(("F", last, i)), box.pop(("Y", last, i))
            with torch.no_grad():
                if fused is None:
                    if judge is not None:
                        loss, gx, grads = judge.eager(x, target)
                        worker.judged(i, loss)
                        judge.rows.move(steps[-1], grads)
                    for (one, first, _), (inward, back), step in zip(parts, given, steps, strict=False):
                        one.eager(f[first] + k, b[first] + k, inward, back, step)
                else:
                    each = [
                        one.given(b[first] + k, inward, back, step)
                        for (one, first, _), (inward, back), step in zip(parts, given, steps, strict=False)
                    ]
                    if judge is not None:
                        each.append(judge.given(x, target, steps[-1]))
                    found = fused([fixed for fixed, _ in each], [changing for _, changing in each])
                    for (one, first, _), (one.y, left, one.gx, factors), step in zip(parts, found, steps, strict=False):
                        one.rings.put(one.rings.places(f[first] + k), left)
                        one.finish(factors, step)
                    if judge is not None:
                        loss, gx = found[-1]
                        worker.judged(i, loss)
                if judge is not None:
                    box["B", last - 1, i] = gx
                for one, first, end in parts:
                    box["F", end + 1, f[end] + k] = one.y[-1]
                    if first:
                        box["B", first - 1, b[first] + k] = one.gx[0]
            self.done = k + 1
            if self.others:
                ops = [(s, b[s] + k) for s in self.others]
                worker.backward(ops)
                worker.update(ops)
        return self.done

    def _steps(self, k: int) -> list[Step | Adaptive] | None:
        """How the weights of each stack, and then of the last stage, are stepped at tick k."""
        if not self.uniform or not self.steps:
            self.steps = []
            for rows in self._rows():
                step = self._step(rows, k)
                if step is None:
                    return None
                self.steps.append(step)
        return self.steps

    def _rows(self) -> list[Rows]:
        return [*(one.stack.rows for one in self.moving), *([self.judge.rows] if self.judge else [])]

    def _step(self, rows: Rows, k: int) -> Step | Adaptive | None:
        numbers = [stage.index for stage in rows.stages]
        fore, back = ([self.options[i[s] + k] for s in numbers] for i in (self.f, self.b))
        return rows.plain(back, partial(self._correction, rows, fore, back) if self.corrects else None, *fore)

    def _correction(self, rows: Rows, fore: Sequence[Options], back: Sequence[Options]) -> Correction:
        """What the method asks of F of micro-batches that were pushed at these options, and of U at those."""
        worker, team = self.worker, Team(rows.stages, self.worker.delays)
        whens = [team.when(0, options, worker.start, worker.base, 0) for options in (fore, back)]
        ahead, late = (worker.method.correction(when) for when in whens)
        assert ahead is not None and late is not None
        return Correction(ahead.ahead, late.late)

    def _fits(self, box: Any, k: int) -> bool:
        """Whether what comes at tick k is as ever."""
        for one in self.moving:
            x = box[("F", one.stack.first, self.f[one.stack.first] + k)]
            if type(x) is not Tensor or x.shape != one.kind[0] or x.dtype != one.kind[1]:
                return False
        if self.judge is None:
            return True
        s = self.judge.stage.index
        return form(box[("F", s, self.f[s] + k)], box[("Y", s, self.f[s] + k)]) == self.judge.form

    def told(self) -> None:
        """Have flights, versions, options and the ledger say what was done."""
        worker, n = self.worker, self.done
        for rows in self._rows():
            rows.alone = False
        with torch.no_grad():
            for one in self.moving:
                first = one.stack.first
                one.end(self.f[first] + n, self.b[first] + n)
        if not n:
            return
        stages, versions = worker.stages, {s: stage.version for s, stage in worker.stages.items()}
        for one in self.moving:
            s = one.stack.first
            one.stack.moved_on(n, self.f[s], self.b[s], self._flight)
        for s in self.inside:
            stage = stages[s]
            if "velocity" in stage.state:
                stage.state = {"velocity": velocity(stage.optimizer, stage.weights)}
        if self.judge is not None:
            last = self.judge.stage
            last.options = self.options[self.f[-1] + n - 1]
            last.peak_flights = max(last.peak_flights, 1)
            for i in range(self.f[-1], self.f[-1] + n):
                del worker.options[i]
        for s in self.inside:
            stages[s].version += n
        numbers, later = self.inside * n, torch.arange(n)[:, None]
        used = (torch.tensor([versions[s] for s in self.inside]) + later).flatten().tolist()
        for kind, mbs in (("F", self.f), ("B", self.b)):
            done = (torch.tensor([mbs[s] for s in self.inside]) + later).flatten().tolist()
            worker.ledger.add(kind, numbers, done, used)

    def _flight(self, s: int, i: int) -> Flight:
        flight = Flight((), None, None, self.worker.stages[s].version + i - self.f[s], False)
        flight.options = self.options[i]
        return flight


def leaps(method: Method) -> bool:
    """Whether ticks at which every stage does the same come, and need no hooks."""
    flows = isinstance(method.schedule, Flowing) and method.schedule.full
    return flows and method.copies != "stash" and described(method)


def torchs(loss: Any) -> bool:
    """Whether a loss is a function or a module of torch's own, perhaps with some arguments given."""
    if isinstance(loss, partial):
        return torchs(loss.func) and not any(
            isinstance(v, torch.nn.Module) for v in chain(loss.args, loss.keywords.values())
        )
    return str(getattr(loss, "__module__", type(loss).__module__)).startswith("torch.nn")
