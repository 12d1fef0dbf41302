"""Steady run: runs ticks at which every stage, or every second one, does F (forward), B (backward) and U (update) of
one micro-batch, without any work per stage.

Flights, versions, options and the ledger are brought up to date when the run is over (`SteadyRun.told`); nobody can see
them before.
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

from pipeback.methods.base import HOOKS, Correction, overrides
from pipeback.methods.momentum import velocity
from pipeback.runtime.worker import Worker
from pipeback.stages.flight import target_on
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.vectorized.adam_rows import AdamStep
from pipeback.vectorized.cuda_graph import CudaGraphed
from pipeback.vectorized.forms import packed
from pipeback.vectorized.joint_step import JointStep
from pipeback.vectorized.rows import Rows, Step
from pipeback.vectorized.tick import LossStage, Parts, StackTick, form
from pipeback.vectorized.wiring import Where, entering, give, leaving, take


@dataclass
class Turn:
    """The stages that are busy at a tick: those that run as one, the last stage as a graph, and the others."""

    moving: list[StackTick]
    where: Where
    judge: LossStage | None
    others: list[int]
    steps: list[Step | AdamStep] = field(default_factory=list)
    varies: bool = False  # whether the steps hold for one tick only
    fused: Any = None  # a compiled tick with steps of this form
    fixed: list[Any] = field(default_factory=list)  # its arguments that stay the same
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [*(one.stack.rows for one in self.moving), *([self.judge.rows] if self.judge else [])]
        self.entering = [(one, *way) for one in self.moving for way in entering(one)]
        self.leaving = [(one, *way) for one in self.moving for way in leaving(one, self.where)]

    def fuse(self, compiled: Any) -> None:
        """Use a compiled function for this turn, with these steps."""
        who: list[StackTick | LossStage] = [*self.moving, *([] if self.judge is None else [self.judge])]
        pairs, stay = list(zip(who, self.steps, strict=True)), isinstance(compiled, CudaGraphed)
        self.fused = compiled
        self.fixed = [one.fixed(step, stay=stay) for one, step in pairs]
        self.told = [one.told(step) for one, step in pairs]

    @property
    def inside(self) -> list[int]:
        """The stages that are part of the compiled function, and no longer run one by one."""
        judges = [] if self.judge is None else [self.judge.stage.index]
        return sorted(chain(*(one.stack.numbers for one in self.moving), judges))


Asked = tuple[int, Any, Any] | None  # a micro-batch, the input and the target of its loss


class SteadyRun:
    """A run of ticks. turns: 1, or 2 where even and odd stages take turns. forwards, backwards: per stage, the
    micro-batch of its next F and B.
    """

    def __init__(
        self,
        worker: Worker,
        judged: Callable[[int, Tensor], None],
        moving: Sequence[StackTick],
        where: Where,
        turns: int,
        teams: dict[int, StageGroup],
        forwards: Sequence[int],
        backwards: Sequence[int],
        options: dict[int, Options],
    ) -> None:
        self.worker, self.judged, self.moving, self.where = worker, judged, moving, where
        self.f, self.b, self.options = forwards, backwards, options
        self.count, self.teams, self._joint = turns, teams, JointStep()
        self._first = 0 if turns == 1 or backwards[1] > backwards[0] else 1  # the number of the first turn
        self.done = 0  # how many ticks were done
        first = next(iter(options.values()))
        self.uniform = all(some is first for some in options.values())
        self.corrects = any(overrides(worker.method, hook) for hook in HOOKS)
        self.stashes = worker.stash

    def turn(self, stage: int) -> int:
        """Return the first tick at which the stage is busy."""
        return (stage + self._first) % self.count

    def rounds(self, stage: int) -> int:
        """Return how many F, B and U the stage has done."""
        return (self.done + self.count - 1 - self.turn(stage)) // self.count

    def take(self, judge: LossStage | None) -> None:
        """Run the last stage as this graph, if its F and B run on the same weights."""
        step = None if judge is None else self._step(judge.rows, 0)
        if step is None or step.drift or not _equal(step.ahead, step.back):
            judge = None
        inside = {s for one in self.moving for s in one.stack.numbers}
        if judge is not None:
            inside.add(judge.stage.index)
        self.turns = [
            Turn(
                [one for one in self.moving if self.turn(one.first) == n],
                self.where,
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
            take(self.turns[0].moving, self.where, self.f, self.b, self.worker.link.box)
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
        """Run at most `most` ticks and return their number; stop at inputs or options that need a new decision.

        compiled: returns a compiled tick.
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
        """Run tick k: every stage whose turn it is has done k since the run began."""
        worker, f, b, judge = self.worker, self.f, self.b, turn.judge
        link = worker.link
        if turn.others:
            worker.forward([(s, f[s] + k) for s in turn.others])
        messages = {(kind, s): link.recv(kind, s, (f if kind == "F" else b)[s] + k) for _, kind, s in turn.entering}
        given = [one.given(messages) for one in turn.moving]  # before anything of this tick replaces them
        asked: Asked = None
        if judge is not None:
            s = judge.stage.index
            i = f[s] + k
            asked = i, link.recv("F", s, i), target_on(judge.stage.device, link.recv("Y", s, i))
        with torch.no_grad():
            for one, how in zip(turn.moving, turn.steps):
                if one.stash is not None:
                    one.stash.keep(f[one.first] + k + one.place)
                if how.drift:
                    one.about_to_drift()
            gx = (self._one_by_one if turn.fused is None else self._fused)(turn, k, given, asked)
            if judge is not None:
                link.send("B", s - 1, i, gx)
            for one, how in zip(turn.moving, turn.steps):
                if how.drift:
                    one.drifted(how)
            for one, kind, s, row in turn.leaving:
                if kind == "F":
                    link.send("F", s + 1, f[s] + k, one.sent(row))
                else:
                    link.send("B", s - 1, b[s] + k, one.sent_back(row))
        self.done += 1
        if turn.others:
            ops = [(s, b[s] + k) for s in turn.others]
            worker.backward(ops)
            worker.update(ops)

    def _one_by_one(self, turn: Turn, k: int, given: Sequence[tuple[Parts, Parts]], asked: Asked) -> Any:
        """Run the stacks one after the other. Returns the gradient of the last stage's input."""
        judge, gx, joint = turn.judge, None, self._joint
        if judge is not None and asked is not None:
            (i, x, target), step = asked, turn.steps[-1]
            loss, gx, grads = judge.eager(x, target, step)
            self.judged(i, loss)
            if isinstance(step, Step) and joint.fits(judge.rows, step):
                joint.add(judge.rows, step, grads)
            else:
                judge.rows.move(step, grads)
        for one, how, (xs, gs) in zip(turn.moving, turn.steps, given, strict=False):
            one.eager(self.f[one.first] + k + one.place, self.b[one.first] + k - one.place, xs, gs, how, joint)
        joint.make()
        return gx

    def _fused(self, turn: Turn, k: int, given: Sequence[tuple[Parts, Parts]], asked: Asked) -> Any:
        """Run the compiled function of the turn. Returns the gradient of the last stage's input."""
        fused, judge, gx = turn.fused, turn.judge, None
        assert fused is not None
        stay = isinstance(fused, CudaGraphed)
        each = [
            one.changing(self.b[one.first] + k - one.place, xs, gs, stay=stay)
            for one, (xs, gs) in zip(turn.moving, given, strict=True)
        ]
        if judge is not None and asked is not None:
            each.append(judge.changing(*asked[1:]))
        found = fused(turn.fixed, [(*some, *how) for some, how in zip(each, turn.told)])
        for one, how, (ys, left, gxs, factors) in zip(turn.moving, turn.steps, found, strict=False):
            one.ys, one.gxs = ys, gxs
            one.rings.put(self.f[one.first] + k + one.place, left)
            one.finish(factors, how)
        if judge is not None and asked is not None:
            loss, gxs = found[-1]
            gx = packed(gxs, judge.packed)
            self.judged(asked[0], loss)
        return gx

    def _steps(self, turn: Turn, k: int) -> list[Step | AdamStep] | None:
        """Return the steps of each stack's weights, and then of the last stage's, at the tick."""
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
        """Return the method's corrections for F at the options `fore`, and for B and U at the options `back`."""
        if self.worker.method.merges:
            return self._asked(rows.stages, fore, back, k)
        each = [self._asked([s], [a], [b], k) for s, a, b in zip(rows.stages, fore, back, strict=True)]
        numbers = {
            name: [number for one in each for number in getattr(one, name)]
            for name in ("ahead", "late", "back", "drift", "rates")
        }
        return Correction(**numbers, used=each[0].used, varies=any(one.varies for one in each))

    def _asked(self, stages: Sequence[Stage], fore: Sequence[Options], back: Sequence[Options], k: int) -> Correction:
        """Return the corrections for these stages, from one call of the method, after k updates."""
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
        """Whether the inputs of the tick have the same form and options as before."""
        box, f = self.worker.link.box, self.f
        if not all(one.fits(box["F", s, f[s] + k]) for one, kind, s in turn.entering if kind == "F"):
            return False
        if turn.judge is None:
            return True
        s = turn.judge.stage.index
        return form(box["F", s, f[s] + k], box["Y", s, f[s] + k]) == turn.judge.form

    def told(self) -> None:
        """Bring flights, versions, options and the ledger up to date."""
        worker = self.worker
        rounds = [self.rounds(s) for s in range(worker.count)]
        f, b = ([i + n for i, n in zip(mbs, rounds, strict=True)] for mbs in (self.f, self.b))
        for turn in self.turns:
            for rows in turn.rows:
                rows.alone = False
        with torch.no_grad():
            give(self.turns[self.done % self.count].moving, self.where, f, b, worker.link.box)
        for turn in self.turns[: self.done]:
            if not turn.inside:
                continue
            n, used = rounds[turn.inside[0]], self._used(turn.inside, rounds[turn.inside[0]])
            for one in turn.moving:
                one.stack.moved_on(n, self.f, self.b, self.options)
            if turn.judge is not None:
                last = turn.judge.stage
                last.went_backward(self.options[f[-1] - 1])
                last.note_flights(1)
                for i in range(self.f[-1], f[-1]):
                    del worker.options[i]
            self._count(turn.inside, n, used)
        for one in self.moving:
            if one.stash is not None:
                one.stash.give()
            one.leave()

    def _used(self, numbers: Sequence[int], rounds: int) -> tuple[list[int], list[int]]:
        """Return the versions of the weights on which these stages ran F and B, stage by stage in every round."""
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
        """Enter F, B and U of these rounds of the stages into the ledger, with the versions `used`."""
        stages, later = self.worker.stages, torch.arange(rounds)[:, None]
        for kind, mbs, versions in zip("FB", (self.f, self.b), used, strict=True):
            done = (torch.tensor([mbs[s] for s in numbers]) + later).flatten().tolist()
            self.worker.ledger.add(kind, list(numbers) * rounds, done, versions)
        for s in numbers:
            stage = stages[s]
            stage.updated(rounds)
            state = self.worker.method.advanced(stage.state, rounds)
            stage.put_state({"velocity": velocity(stage.optimizer, stage.weights)} if "velocity" in state else state)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
