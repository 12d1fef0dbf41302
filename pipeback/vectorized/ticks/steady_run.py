"""Steady run: runs ticks at which stages do F (forward), B (backward) and U (update) of one micro-batch each, without
any work per stage: every stage, every second one, or those that have something to do.

A run goes on from push to push. Flights, versions, options and the ledger are brought up to date when it is over;
nobody sees them before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.counts import numbered
from pipeback.errors import StageError
from pipeback.runtime.worker import Worker
from pipeback.schedules.order import Ops
from pipeback.schedules.spans import TickSpan
from pipeback.tensors.copies import to_device
from pipeback.vectorized.buffers.version_ring import EntryVersions
from pipeback.vectorized.steps.asked_steps import AskedSteps
from pipeback.vectorized.steps.joint_step import JointStep
from pipeback.vectorized.steps.own_step import OwnStep
from pipeback.vectorized.steps.row_tensors import AnyStep
from pipeback.vectorized.steps.step_form import RingPlaces, count, shifts_alike
from pipeback.vectorized.steps.step_plan import StepPlan
from pipeback.vectorized.ticks.captured_ticks import CapturedTicks
from pipeback.vectorized.ticks.catch_up import Rounds
from pipeback.vectorized.ticks.in_turn import InTurn
from pipeback.vectorized.ticks.judging import Asked, Judge, Judging
from pipeback.vectorized.ticks.loss_stage import LossStage, form
from pipeback.vectorized.ticks.run_options import RunOptions
from pipeback.vectorized.ticks.tick import Parts, StackTick
from pipeback.vectorized.ticks.turn import StackRows, Turn
from pipeback.vectorized.ticks.updates_by_group import UpdatesByGroup
from pipeback.vectorized.ticks.wiring import Where, give, take
from pipeback.vectorized.tracing.forms import packed

LIMIT = 1024  # rounds after which a run ends, since it holds the options of its micro-batches
Compiled = Callable[..., Any]  # returns a compiled tick
Given = tuple[Parts, Callable[[], Parts]]  # see `StackTick.given`


class SteadyRun:
    """A run of ticks. turns: 1, or 2 where even and odd stages take turns. f, b: per stage, the micro-batch of its next
    F and B.
    """

    def __init__(
        self,
        worker: Worker,
        judged: Callable[[int, Tensor], None],
        asked: AskedSteps,
        moving: Sequence[StackTick],
        where: Where,
        turns: int,
        f: Sequence[int],
        b: Sequence[int],
        groups: UpdatesByGroup | None = None,
        entered: EntryVersions | None = None,
        line: InTurn | None = None,
    ) -> None:
        """groups: None: every round has an update, which is part of its tick. entered: None: every F runs on the newest
        weights. line: lets micro-batches take turns; then turns = 1.
        """
        self.worker, self.judged, self.asked, self.moving, self.where = worker, judged, asked, list(moving), where
        self.count, self.joint, self.groups = turns, JointStep(), groups
        self.judging = Judging(worker, judged, self.joint, asked.along)
        self.line = line
        # of each stage, the next micro-batches; to these come the rounds of its turn
        self.f, self.b = list(f), list(b)
        self.entered = entered
        self._began = list(f), list(b)
        self.turns: list[Turn] = []  # of the even stages, and of the odd ones
        self.judge: Judge | None = None
        flights = worker.stages[worker.first].flights
        self.options = RunOptions({i: flight.options for i, flight in flights.items()} or worker.options)
        self.parted = False  # whether F and B of the last stage, which is run as one graph, no longer share weights
        self._looked = False
        self._even = True  # whether all stages of a turn have done the same number of rounds
        self._grow()

    def rounds(self, s: int) -> int:
        """Return how many F, B and U a stage has done."""
        return self.f[s] + self.turns[s % self.count].rounds - self._began[0][s]

    @property
    def long(self) -> bool:
        """Whether it has gone on for so long that it should end."""
        return max(self.rounds(self.worker.first), self.rounds(self.worker.last)) >= LIMIT

    def take(self, judge: Judge | None, plan: StepPlan | None) -> None:
        """Run the last stage as this graph, if its F and B run on the same weights. plan: that of the last stage."""
        last = self.worker.last
        if judge is not None and plan is not None:
            step = self._step(plan, 0)
            if step is None or not shifts_alike(step):
                judge = None
        self.judge = judge
        inside = {s for one in self.moving for s in one.stack.numbers} | ({last} if judge is not None else set())
        self.turns = [
            Turn(
                [one for one in self.moving if one.first % self.count == n],
                self.where,
                judge if last % self.count == n else None,  # only the worker of the last stage has one
                plan,
                [s for s in self.worker.stages if s not in inside and s % self.count == n],
            )
            for n in range(self.count)
        ]

    def begin(self) -> None:
        """Take over what the stages hold beside their weights."""
        with torch.no_grad():
            for one in self.moving:
                if self.worker.stash:
                    one.take_weights(self.entered)
                if self.asked.along in one.stack.stages[0].state:
                    one.take_drift(self.asked.along)
            if self.line is not None:
                self.line.begin(self.b)
            else:
                take(self.moving, self.where, self._next(), self.worker.link.box)

    def look(self) -> None:
        """Note that micro-batches may have come, and that the user may have changed the optimizers or their state."""
        self._looked = False
        for turn in self.turns:
            turn.look()

    def see(self) -> bool:
        """Take in what has changed; return whether whole rows can still be stepped."""
        if not self._looked:
            self._grow()
            if any(plan.hooked() for turn in self.turns for plan in turn.plans):
                return False
            with torch.no_grad():
                for turn in self.turns:
                    for plan, step in zip(turn.plans, self.steps(turn) or (), strict=False):
                        plan.rows.whole.kept(step)
                        plan.rows.alone = True
            self._looked = True
        return True

    def _grow(self) -> None:
        """Take in the options of micro-batches that have come, and forget those that are no longer needed."""
        if self.options.grow(self.worker.options, self._oldest):
            for turn in self.turns:
                turn.steps = []

    # -- ticks ---------------------------------------------------------------------------------------------------------

    def go(self, span: TickSpan, compiled: Compiled | None, done: list[None]) -> None:
        """Run ticks of a span, and append to `done` for each; stop at inputs or options that need a new decision."""
        turn, mine = self.turns[span.stages.start % self.count], self._mine(span.stages)
        if not self.see():
            return
        if not mine and span.ticks == 1:  # a tick of other workers
            self._count(span.stages)
            done.append(None)
            return
        if len(mine) < turn.size:
            parts = turn.parts(mine)
            ready = self._ready(turn, mine) and not turn.varies
            if not ready or compiled is not None or not all(part.able for part in parts):
                return
            self._tick(turn, parts, mine)
            self._count(span.stages)
            self._even = False
            done.append(None)
            return
        end = len(done) + min(span.ticks, LIMIT)
        while len(done) < end:
            known, every = turn.steps, range(self.worker.count)
            if not self._ready(turn, every) or (turn.varies and not self._even):
                break
            if compiled is not None and (turn.steps is not known or turn.fused is None):
                turn.fuse(compiled(turn.moving, turn.judge, turn.steps))
            ticks = self._tick(turn, turn.whole, every, end - len(done))
            turn.rounds += 1
            if span.ticks == 1:  # perhaps not of all stages of other workers
                self._count([s for s in every[self.turns.index(turn) :: self.count] if s not in span.stages], -1)
            done += [None] * ticks
            turn = self.turns[(self.turns.index(turn) + 1) % self.count]

    def _count(self, stages: Sequence[int], rounds: int = 1) -> None:
        """Count rounds of some stages beside those of a turn, also of other workers, whose versions are asked for."""
        for s in stages:
            self.f[s] += rounds
            self.b[s] += rounds

    def _mine(self, stages: range) -> range:
        """Return those of these stages that are the worker's own."""
        first, last, step = self.worker.first, self.worker.last, stages.step
        begin = max(stages.start, first + (stages.start - first) % step)
        return range(begin, min(stages.stop, last + 1), step)

    def _ready(self, turn: Turn, stages: range) -> bool:
        """Whether these stages of a turn can be stepped at once, and their inputs have the same form as before."""
        if self.steps(turn) is None:
            return False
        box, f, k = self.worker.link.box, self.f, turn.rounds
        for one, kind, s in turn.entering:
            if kind == "F" and s in stages:
                self.worker.link.wait("F", s, f[s] + k)
                if not one.fits(box["F", s, f[s] + k]):
                    return False
        if turn.judge is None or (s := turn.judge.stage.index) not in stages:
            return True
        self.worker.link.wait("F", s, f[s] + k)
        target = [box["Y", s, f[s] + k]] if turn.judge.stage.judges else []
        return form(box["F", s, f[s] + k], *target) == turn.judge.form

    def steps(self, turn: Turn) -> list[AnyStep] | None:
        """Return the steps of each stack's weights, and then of the last stage's, at the next tick of a turn."""
        if not self.options.uniform:
            self.options.done(self._oldest)
        if turn.steps and self.options.uniform and not turn.varies and self.groups is None:
            return turn.steps
        found = [self._step(plan, turn.rounds) for plan in turn.plans]
        turn.steps = [step for step in found if step is not None]
        if len(turn.steps) < len(found):
            turn.steps = []
            return None
        turn.varies = any(step.varies for step in turn.steps)
        if turn.varies and turn.judge is not None and not shifts_alike(turn.steps[-1]):
            self.parted = True
        return None if self.parted else turn.steps

    def _step(self, plan: StepPlan, rounds: int) -> AnyStep | None:
        if self.options.uniform:
            fore = back = [self.options.now] * len(plan.stages)
        else:
            numbers = [stage.index for stage in plan.stages]
            fore, back = ([self.options.of(i[n] + rounds) for n in numbers] for i in (self.f, self.b))
        step = self.asked.step(plan, fore, back, rounds)
        return step if self.groups is None else self.groups.step(step, plan.stages, self.f, rounds)

    def question(self, turn: Turn) -> Asked:
        """Return the micro-batch that the last stage judges now."""
        assert turn.judge is not None
        s, link = turn.judge.stage.index, self.worker.link
        i, stage = self.f[s] + turn.rounds, turn.judge.stage
        target = to_device(stage.device, link.recv("Y", s, i)) if stage.judges else None
        return i, link.recv("F", s, i), target

    def _tick(self, turn: Turn, parts: Sequence[StackRows], stages: range, most: int = 1) -> int:
        """Run the tick of these stages of a turn: of these rows of stacks, and of stages outside. Returns the number of
        ticks: a CUDA graph may do up to `most`, of which it counts all but one.
        """
        worker, f, b, k = self.worker, self.f, self.b, turn.rounds
        link, others = worker.link, [s for s in turn.others if s in stages]
        if worker.began is not None:
            worker.began(("F", stages[0], f[stages[0]] + k))
        if others:
            self.enter([(s, f[s] + k) for s in others])
            worker.forward([(s, f[s] + k) for s in others])
        come = [(kind, s) for _, kind, s in turn.entering if s in stages]
        messages = {s: link.recv("F", s, f[s] + k) for kind, s in come if kind == "F"}
        awaited = {s: partial(link.recv, "B", s, b[s] + k) for kind, s in come if kind == "B"}
        # before anything of this tick replaces it
        given = [part.one.given(part.rows, *self._ticks(part, k), messages, awaited) for part in parts]
        judges = turn.judge is not None and worker.last in stages
        asked = self.question(turn) if judges else None
        with torch.no_grad():
            if turn.fused is None:
                gx = self._one_by_one(turn, parts, given, asked, stages)
            else:
                gx = self._fused(turn, parts, given, asked, most)
            if asked is not None:
                link.send("B", worker.last - 1, asked[0] + turn.rounds - k, gx)
        if others:
            ops = [(s, b[s] + k) for s in others]
            worker.backward(ops)
            if self.groups is None:
                worker.update(ops)
        self.update_groups(turn, stages)
        return turn.rounds - k + 1

    def enter(self, ops: Ops) -> None:
        """Tell the worker at which versions the micro-batches have entered whose F stages do one by one."""
        if self.entered is not None:
            self.worker.entries |= {i: self.entered.entry(self.worker.stages[s], i) for s, i in ops}

    def update_groups(self, turn: Turn, stages: range) -> None:
        """Make the updates of several micro-batches that are due after a round of these stages of a turn."""
        if self.groups is not None:
            came = [(s, self.b[s] + turn.rounds) for s in sorted([*turn.inside, *turn.others]) if s in stages]
            self.groups.done(came, self.options.of)

    def _ticks(self, part: StackRows, rounds: int) -> tuple[int, int]:
        """Return the micro-batches of F and B at a place p = 0, when these rows have done so many rounds."""
        first, stack = part.rows[0], part.one.stack
        s, place = stack.numbers[first], stack.places[first]
        return self.f[s] + rounds + place, self.b[s] + rounds - place

    def _one_by_one(
        self, turn: Turn, parts: Sequence[StackRows], given: Sequence[Given], asked: Asked | None, stages: range
    ) -> Any:
        """Run the stacks one after the other. Returns the gradient of the last stage's input."""
        assert asked is None or turn.judge is not None
        gx = None if asked is None else self.judging.whole(turn.judge, turn.steps[-1], asked)  # type: ignore[arg-type]
        for part, some in zip(parts, given, strict=True):
            leave = partial(turn.leave, self.worker.link, (self.f, self.b), part.one, stages)
            ticks = self._ticks(part, turn.rounds)
            part.one.eager(part.rows, *ticks, some, turn.steps[part.number], self.joint, leave)
        self.joint.make()
        return gx

    def _fused(
        self, turn: Turn, parts: Sequence[StackRows], given: Sequence[Given], asked: Asked | None, most: int
    ) -> Any:
        """Run the compiled function of the turn; a CUDA graph up to `most` times, all but one of which the turn counts.
        Returns the gradient of the last stage's input.
        """
        judge, captured = turn.judge if isinstance(turn.judge, LossStage) and asked is not None else None, turn.captured
        ticks = [self._ticks(part, turn.rounds) for part in parts]
        for part, (f, _) in zip(parts, ticks, strict=True):
            part.one.before(f, turn.steps[part.number])
        each = [
            part.one.changing(f, b, xs, gs(), stay=captured is not None)
            for part, (f, b), (xs, gs) in zip(parts, ticks, given, strict=True)
        ]
        each += [] if judge is None or asked is None else [judge.changing(*asked[1:])]
        before = [] if judge is None else self.judging.before(judge, turn.steps[-1])
        try:
            if captured is None:
                found = turn.fused(turn.fixed, [(*some, *how) for some, how in zip(each, turn.told, strict=True)])
            else:
                captured.run(each)
                self._again(turn, captured, parts, most)
                found, ticks = captured.results(), [self._ticks(part, turn.rounds) for part in parts]
        except Exception as error:
            names = numbered("stage", sorted(s for part in parts for s in part.one.stack.numbers))
            raise StageError(f"{names} and the loss: a tick failed: {error}") from error
        for part, (f, b), (ys, left, gxs, factors) in zip(parts, ticks, found, strict=False):
            one = part.one
            one.ys.send(f, part.rows, ys)
            one.gxs.send(b, part.rows, gxs)
            if captured is None:
                one.rings.put(f, left)
            one.finish(b, factors, turn.steps[part.number])
            count(one.stack.rows.whole, turn.steps[part.number])
            turn.leave(self.worker.link, (self.f, self.b), one, range(self.worker.count), "F")
            turn.leave(self.worker.link, (self.f, self.b), one, range(self.worker.count), "B")
        if judge is None:
            return None
        loss, gxs = found[-1]
        self.judging.drift(judge, before, turn.steps[-1])
        count(judge.rows.whole, turn.steps[-1])
        self.judged(self.f[judge.stage.index] + turn.rounds, loss)
        if isinstance(turn.steps[-1], OwnStep):
            judge.rows.whole.move(turn.steps[-1], judge.rows.whole.gradients())
        return packed(gxs, judge.packed)

    def _again(self, turn: Turn, captured: CapturedTicks, parts: Sequence[StackRows], most: int) -> None:
        """Run further ticks of a turn, up to `most` with the one before, and count them."""
        if len(self.turns) > 1 or turn.others or turn.varies or not self.options.uniform or self.worker.began:
            return
        k, first, last = turn.rounds, self.f[self.worker.first], self.f[self.worker.last]

        def waits(n: int) -> list[RingPlaces]:
            return [part.one.waits(*self._ticks(part, k + n)) for part in parts]

        turn.rounds += captured.go_on(self.worker.link.box, first + k, last + k, waits, self.judged, most)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[list[int], list[int]]:
        """Return of each stage the micro-batches of its next F and B."""
        rounds = [turn.rounds for turn in self.turns] or [0]
        rounds = [rounds[s % len(rounds)] for s in range(self.worker.count)]
        f, b = ([i + n for i, n in zip(mbs, rounds, strict=True)] for mbs in (self.f, self.b))
        return f, b

    @property
    def _oldest(self) -> int:
        """The oldest micro-batch whose options are still needed: the last one of which a stage has done B."""
        return min(self._next()[1][self.worker.first : self.worker.last + 1]) - 1

    def finish(self) -> None:
        """Bring flights, versions, options and the ledger up to date."""
        self.look()
        with torch.no_grad():
            if self.line is not None:
                self.line.finish(self._next()[1])
            else:
                give(self.moving, self.where, self._next(), self.worker.link.box)
        done = [self.rounds(s) for s in range(self.worker.count)]
        turns = 0 if self.line is not None else self.count
        rounds = Rounds(self.worker, done, *self._began, turns, self.groups, self.entered)
        plans = [plan for turn in self.turns for plan in turn.plans if plan.state.give()]
        own = {stage.index for plan in plans for stage in plan.stages}
        rounds.tell(self.moving, self.judge, self.options.known, own, stashes=self.worker.stash)
