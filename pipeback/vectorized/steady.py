"""Steady: runs of ticks at which every stage, or every second one, does F, B and U of one micro-batch, without a look
at single stages.

The order, flights, versions and the ledger are brought up to date when a run is over; nobody can see them before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import HOOKS, Correction, Method, When, described, overrides
from pipeback.methods.momentum import velocity
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Order
from pipeback.schedules.programs import Flowing
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.vectorized.adam_rows import AdamStep
from pipeback.vectorized.capture import Unfit, capture_loss_stage
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.recent import Recent
from pipeback.vectorized.ring_buffers import Kind, RingBuffers
from pipeback.vectorized.rows import Rows, Step
from pipeback.vectorized.stack import Compile, Stack
from pipeback.vectorized.tick import LossStage, StackTick, form, fused
from pipeback.vectorized.verify import check_plain, example, judged_alike, listened


class Steady:
    """Of a worker with `stacks`. judged: told of every micro-batch's loss."""

    def __init__(self, worker: Worker, judged: Callable[[int, Tensor], None], stacks: Sequence[Stack]) -> None:
        self.worker, self.judged, self.stacks = worker, judged, list(stacks)
        schedule = worker.method.schedule
        self.turns = schedule.turns if leaps(worker.method) and isinstance(schedule, Flowing) else 0
        self.last = worker.stages[worker.count - 1]
        self._moving: Recent[tuple[RingBuffers, ...], list[StackTick]] = Recent()
        self._judges: Recent[Any, LossStage | None] = Recent()
        self._judge_rows: Rows | None = None
        self._examples: Recent[Kind, Tensor] = Recent()  # of what stacks give
        self._teams: dict[int, StageGroup] = {}  # of one stage
        self._fused: Recent[tuple[Any, ...], Any] = Recent()  # by what is moved, who judges, and how it is stepped

    def run(self, order: Order, ticks: int) -> int:
        """Do as many of the next `ticks` ticks as can be done so, and return their number."""
        moving = self._ready() if self.turns else None
        if moving is None:
            return 0
        forwards = [order.start + i for i in order.forwards]
        backwards = [order.start + i for i in order.backwards]
        options = {i: f.options for i, f in self.worker.stages[0].flights.items()}
        told = options | self.worker.options
        run = SteadyRun(self.worker, self.judged, moving, self.turns, self._teams, forwards, backwards, told)
        judge = None
        if self._may_judge:
            x = self._judges_input(forwards[-1])
            if x is None:
                ticks = 1  # after it, there is one to make a graph for
            else:
                judge = self._judge(x, self.worker.link.box["Y", self.last.index, forwards[-1]])
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
            for stack in self.stacks:
                stack.leaps = bool(run.turns[0].steps)

    def _ready(self) -> list[StackTick] | None:
        kinds = [kind for stack in self.stacks if (kind := stack.one_kind) is not None]
        if len(kinds) < len(self.stacks):
            return None
        key = tuple(stack.rings(kind) for stack, kind in zip(self.stacks, kinds, strict=True))
        if key not in self._moving:
            made = {stack.name: StackTick(stack, rings) for stack, rings in zip(self.stacks, key, strict=True)}
            for one in made.values():
                one.source = made[(one.stack.partner or one.stack).name]
            self._moving[key] = list(made.values())
        return self._moving.used(key)

    @property
    def _may_judge(self) -> bool:
        """Whether the last stage has a loss of torch's own. What another computes may change from call to call, which a
        graph would not.
        """
        stage = self.last
        return stage.stack is None and stage.stream is None and stage.loss is not None and torchs(stage.loss)

    def _judges_input(self, mb: int) -> Any:
        """What the last stage is given of a micro-batch, or something of its form; None where nobody knows it yet."""
        name, stack = ("F", self.last.index, mb), self.worker.stages[self.last.index - 1].stack
        if name in self.worker.link.box:
            return self.worker.link.box[name]
        kind = None if stack is None else stack.one_kind
        if stack is None or kind is None:
            return None
        if kind not in self._examples:
            self._examples[kind] = example(kind[0], kind[1], stack.rows.weights[0].device)
        return self._examples.used(kind)

    def _judge(self, x: Any, target: Any) -> LossStage | None:
        """The last stage as a graph, if it can be written so."""
        stage = self.last
        assert stage.loss is not None
        key = form(x, target), stage.module.training, listened(stage.module)
        if key[0] is None or not x.is_floating_point():
            return None
        if key not in self._judges:
            self._judges[key] = None
            try:
                clones = check_plain([stage], x)
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
        """What a compiler makes of a tick with such steps. It need not look at what it is given: this does."""
        rooms = [(one, one.rings.length) for one in moving]
        key = (*rooms, judge, *(step.form for step in steps), *_numerics())
        if key not in self._fused:
            self._fused[key] = fused(moving, judge, steps, compile)
        return self._fused.used(key)


def _numerics() -> tuple[Any, ...]:
    """What is set for all of torch, and is compiled in."""
    return (
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@dataclass
class Turn:
    """Who does something at a tick: stages that run as one, the last stage as a graph, the other ones."""

    moving: list[StackTick]
    judge: LossStage | None
    others: list[int]
    steps: list[Step | AdamStep] = field(default_factory=list)
    varies: bool = False  # the steps hold for one tick
    fused: Any = None  # what a compiler has made of a tick with such steps
    fixed: list[Any] = field(default_factory=list)  # what it is given at every tick
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [*(one.stack.rows for one in self.moving), *([self.judge.rows] if self.judge else [])]
        self.parts = [(one, one.stack.first, one.stack.last) for one in self.moving]

    def fuse(self, compiled: Any) -> None:
        """Have a compiled function do it, with these steps."""
        who: list[StackTick | LossStage] = [*self.moving, *([] if self.judge is None else [self.judge])]
        pairs, stay = list(zip(who, self.steps, strict=True)), isinstance(compiled, CudaGraphed)
        self.fused = compiled
        self.fixed = [one.fixed(step, stay=stay) for one, step in pairs]
        self.told = [one.told(step) for one, step in pairs]

    @property
    def inside(self) -> list[int]:
        """The stages that are gone through no more."""
        judges = [] if self.judge is None else [self.judge.stage.index]
        return sorted(chain(*(one.stack.numbers for one in self.moving), judges))


class SteadyRun:
    """Some ticks. turns: 1, or 2 where stages of even and odd number take turns. forwards, backwards: the micro-batches
    that every stage takes next.
    """

    def __init__(
        self,
        worker: Worker,
        judged: Callable[[int, Tensor], None],
        moving: Sequence[StackTick],
        turns: int,
        teams: dict[int, StageGroup],
        forwards: Sequence[int],
        backwards: Sequence[int],
        options: dict[int, Options],
    ) -> None:
        self.worker, self.judged, self.moving = worker, judged, moving
        self.f, self.b, self.options = forwards, backwards, options
        self.count, self.teams = turns, teams
        self._first = 0 if turns == 1 or backwards[1] > backwards[0] else 1  # of the first turn
        self.done = 0  # ticks
        first = next(iter(options.values()))
        self.uniform = all(some is first for some in options.values())
        self.corrects = any(overrides(worker.method, hook) for hook in HOOKS)
        self.stashes = worker.stash

    def turn(self, stage: int) -> int:
        """The first tick of the stage."""
        return (stage + self._first) % self.count

    def rounds(self, stage: int) -> int:
        """How many F, B and U it has done."""
        return (self.done + self.count - 1 - self.turn(stage)) // self.count

    def take(self, judge: LossStage | None) -> None:
        """Have the last stage be this graph, if its F and B run on the same weights."""
        step = None if judge is None else self._step(judge.rows, 0)
        if step is None or step.drift or not _equal(step.ahead, step.back):
            judge = None
        inside = {s for one in self.moving for s in one.stack.numbers}
        if judge is not None:
            inside.add(judge.stage.index)
        self.turns = [
            Turn(
                [one for one in self.moving if self.turn(one.stack.first) == n],
                judge if judge is not None and self.turn(judge.stage.index) == n else None,
                [s for s in self.worker.stages if s not in inside and self.turn(s) == n],
            )
            for n in range(self.count)
        ]

    def adapts(self) -> bool:
        """Whether a step counts its updates, which Adam does in host memory."""
        return any(isinstance(step, AdamStep) for turn in self.turns for step in self._steps(turn, 0) or ())

    def begin(self) -> None:
        with torch.no_grad():
            for one in self.turns[0].moving:
                one.begin(self.f, self.b, self.worker.link.box)
            for one in self.moving:
                if self.stashes:
                    one.take_weights()
                if "drift" in one.stack.stages[0].state:
                    one.take_drift()
            for turn in self.turns:
                for rows, step in zip(turn.rows, self._steps(turn, 0) or (), strict=False):
                    rows.kept(step)
                    rows.alone = True

    def ticks(self, most: int, compiled: Callable[..., Any] | None) -> int:
        """Do so many, or fewer where a micro-batch or options come that need another look. compiled: gives what a
        compiler has made of a tick.
        """
        while self.done < most:
            turn, k = self.turns[self.done % self.count], self.done // self.count
            known, steps = turn.steps, self._steps(turn, k)
            if steps is None or not self._fits(turn, k):
                break
            if compiled is not None and (steps is not known or turn.fused is None):
                turn.fuse(compiled(turn.moving, turn.judge, steps))
            self._tick(turn, k)
        return self.done

    def _tick(self, turn: Turn, k: int) -> None:
        """Every stage whose turn it is has done k since the run began."""
        worker, f, b, judge, fused = self.worker, self.f, self.b, turn.judge, turn.fused
        box = worker.link.box
        if turn.others:
            worker.forward([(s, f[s] + k) for s in turn.others])
        parts = [(*part, step) for part, step in zip(turn.parts, turn.steps)]
        given = [
            (
                box.pop(("F", first, f[first] + k)) if one.enters else None,
                box.pop(("B", last, b[last] + k)) if one.leaves else None,
            )
            for one, first, last in turn.parts
        ]
        if judge is not None:
            s, step = judge.stage.index, turn.steps[-1]
            i = f[s] + k
            x, target = box.pop(("F", s, i)), box.pop(("Y", s, i))
        with torch.no_grad():
            for one, first, _, how in parts:
                if one.stash is not None:
                    one.stash.keep(f[first] + k)
                if how.drift:
                    one.about_to_drift()
            if fused is None:
                if judge is not None:
                    loss, gx, grads = judge.eager(x, target, step)
                    self.judged(i, loss)
                    judge.rows.move(step, grads)
                for (one, first, _, how), (inward, back) in zip(parts, given, strict=True):
                    one.eager(f[first] + k, b[first] + k, inward, back, how)
            else:
                stay = isinstance(fused, CudaGraphed)
                each = [
                    one.changing(b[first] + k, inward, back, stay=stay)
                    for (one, first, _), (inward, back) in zip(turn.parts, given)
                ]
                if judge is not None:
                    each.append(judge.changing(x, target))
                found = fused(turn.fixed, [(*some, *how) for some, how in zip(each, turn.told)])
                for (one, first, _, how), (one.y, left, one.gx, factors) in zip(parts, found, strict=False):
                    one.rings.put(one.rings.places(f[first] + k), left)
                    one.finish(factors, how)
                if judge is not None:
                    loss, gx = found[-1]
                    self.judged(i, loss)
            if judge is not None:
                box["B", s - 1, i] = gx
            for one, first, last, how in parts:
                if how.drift:
                    one.drifted(how)
                if one.leaves:
                    box["F", last + 1, f[last] + k] = one.y[-1]
                if one.enters and first:
                    box["B", first - 1, b[first] + k] = one.gx[0]
        self.done += 1
        if turn.others:
            ops = [(s, b[s] + k) for s in turn.others]
            worker.backward(ops)
            worker.update(ops)

    def _steps(self, turn: Turn, k: int) -> list[Step | AdamStep] | None:
        """How the weights of each stack, and then of the last stage, are stepped at the tick."""
        if turn.steps and self.uniform and not turn.varies:
            return turn.steps
        turn.steps = []
        for rows in turn.rows:
            step = self._step(rows, k)
            if step is None:
                turn.steps = []
                return None
            turn.steps.append(step)
        turn.varies = any(step.varies for step in turn.steps)
        return turn.steps

    def _step(self, rows: Rows, k: int) -> Step | AdamStep | None:
        numbers = [stage.index for stage in rows.stages]
        fore, back = ([self.options[i[s] + k] for s in numbers] for i in (self.f, self.b))
        return rows.plain(back, partial(self._correction, rows, fore, back, k) if self.corrects else None, *fore)

    def _correction(self, rows: Rows, fore: Sequence[Options], back: Sequence[Options], k: int) -> Correction:
        """What the method asks of F of micro-batches that were pushed at these options, and of B and U at those."""
        if self.worker.method.merges:
            return self._asked(rows.stages, fore, back, k)
        each = [self._asked([s], [a], [b], k) for s, a, b in zip(rows.stages, fore, back, strict=True)]
        numbers = {
            name: [number for one in each for number in getattr(one, name)]
            for name in ("ahead", "late", "back", "drift", "rates")
        }
        return Correction(**numbers, used=each[0].used, varies=any(one.varies for one in each))

    def _asked(self, stages: Sequence[Stage], fore: Sequence[Options], back: Sequence[Options], k: int) -> Correction:
        """Of these stages, which one call serves, after k updates."""
        worker, first = self.worker, stages[0]
        if len(stages) > 1:
            team = StageGroup(stages, worker.delays)
        else:
            team = self.teams[first.index] = self.teams.get(first.index) or StageGroup(stages, worker.delays)
        state = worker.method.advanced(first.state, k)
        found = [
            worker.method.correction(team.when(0, options, worker.start, worker.base, 0), state)
            for options in ([fore, back] if any(map(is_not, fore, back)) else [back])
        ]
        ahead, then = found[0], found[-1]
        assert ahead is not None and then is not None
        return then._replace(ahead=ahead.ahead)

    def _fits(self, turn: Turn, k: int) -> bool:
        """Whether what comes at the tick is as ever."""
        box = self.worker.link.box
        for one in turn.moving:
            if one.enters:
                x = box[("F", one.stack.first, self.f[one.stack.first] + k)]
                if type(x) is not Tensor or x.shape != one.kind[0] or x.dtype != one.kind[1]:
                    return False
        if turn.judge is None:
            return True
        s = turn.judge.stage.index
        return form(box[("F", s, self.f[s] + k)], box[("Y", s, self.f[s] + k)]) == turn.judge.form

    def told(self) -> None:
        """Have flights, versions, options and the ledger say what was done."""
        worker = self.worker
        rounds = [self.rounds(s) for s in range(worker.count)]
        f, b = ([i + n for i, n in zip(mbs, rounds, strict=True)] for mbs in (self.f, self.b))
        for turn in self.turns:
            for rows in turn.rows:
                rows.alone = False
        with torch.no_grad():
            for one in self.turns[self.done % self.count].moving:
                one.end(f, b, worker.link.box)
        for turn in self.turns[: self.done]:
            if not turn.inside:
                continue
            n, used = rounds[turn.inside[0]], self._used(turn.inside, rounds[turn.inside[0]])
            for one in turn.moving:
                s = one.stack.first
                one.stack.moved_on(n, self.f[s], self.b[s], self.options)
            if turn.judge is not None:
                last = turn.judge.stage
                last.options = self.options[f[-1] - 1]
                last.peak_flights = max(last.peak_flights, 1)
                for i in range(self.f[-1], f[-1]):
                    del worker.options[i]
            self._count(turn.inside, n, used)
        for one in self.moving:
            if one.stash is not None:
                one.stash.give()
            one.leave()

    def _used(self, numbers: Sequence[int], rounds: int) -> tuple[list[int], list[int]]:
        """The versions of the weights that so many F and B of these stages ran on, stage by stage in every round."""
        stages = self.worker.stages
        forward = torch.tensor([stages[s].version for s in numbers]) + torch.arange(rounds)[:, None]
        if not self.stashes:
            return (forward.flatten().tolist(),) * 2
        every = [
            [*(flight.version for flight in stages[s].flights.values()), *mine][:rounds]
            for s, mine in zip(numbers, forward.t().tolist(), strict=True)
        ]
        return forward.flatten().tolist(), torch.tensor(every).t().flatten().tolist()

    def _count(self, numbers: Sequence[int], rounds: int, used: tuple[list[int], list[int]]) -> None:
        """So many F, B and U of these stages, on these versions."""
        stages, later = self.worker.stages, torch.arange(rounds)[:, None]
        for kind, mbs, versions in zip("FB", (self.f, self.b), used, strict=True):
            done = (torch.tensor([mbs[s] for s in numbers]) + later).flatten().tolist()
            self.worker.ledger.add(kind, list(numbers) * rounds, done, versions)
        for s in numbers:
            stages[s].version += rounds
            stages[s].state = self.worker.method.advanced(stages[s].state, rounds)
            if "velocity" in stages[s].state:
                stages[s].state = {"velocity": velocity(stages[s].optimizer, stages[s].weights)}


def leaps(method: Method) -> bool:
    """Whether ticks at which every stage, or every second one, does the same come, and need no hooks."""
    flows = isinstance(method.schedule, Flowing) and method.schedule.turns > 0
    return flows and described(method) and (method.copies != "stash" or stashes(method))


def stashes(method: Method) -> bool:
    """Whether B runs on what F used, and nothing else is asked for."""
    correction = method.correction(When(0, 1, 0, 0, 0), {})
    return correction is not None and correction.used


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def torchs(loss: Any) -> bool:
    """Whether a loss is a function or a module of torch's own, perhaps with some arguments given."""
    if isinstance(loss, partial):
        return torchs(loss.func) and not any(
            isinstance(v, torch.nn.Module) for v in chain(loss.args, loss.keywords.values())
        )
    return str(getattr(loss, "__module__", type(loss).__module__)).startswith("torch.nn")
