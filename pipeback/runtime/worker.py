"""Worker: runs the operations of some stages wave by wave, and calls the hooks of the method for them.

Before an operation it has the weights put into place, and its executor does the operation on them.

The operations of a wave, all F (forward), B (backward) or U (update), are of different stages, so they may be joined
into one autograd call or one optimizer step. This changes no bit, and saves the overhead of Python per stage. Those of
a split backward, I and W, are done one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StageError
from pipeback.methods.answers import state_of
from pipeback.methods.base import Method, When, overrides
from pipeback.private import hooked
from pipeback.runtime.chosen_weights import HookCall
from pipeback.runtime.executor import Executor, JoinedOperations
from pipeback.runtime.ledger import Ledger
from pipeback.runtime.link import OtherBatch, StageLink
from pipeback.runtime.optimizer_state_watch import OptimizerStateWatch
from pipeback.runtime.replicas import Replicas, SummedUpdate
from pipeback.runtime.staleness import Watch
from pipeback.runtime.weight_provider import ResidentWeights, WeightProvider, forget_casts
from pipeback.runtime.weight_write_watch import WeightWriteWatch
from pipeback.schedules.ops import Kind
from pipeback.schedules.order import Ops, Wave
from pipeback.schedules.placement import Placed
from pipeback.stages.gradients import GradientSums
from pipeback.stages.joint_optimizer import Options, joinable
from pipeback.stages.stage import Stage
from pipeback.stages.team import StageGroup
from pipeback.tensors.copies import to_device
from pipeback.tensors.weight_list import Weights, copy_all

_WRITTEN = (
    "; a forward that writes into its weights, as self.weight.clamp_() does under torch.no_grad(), must write into "
    "their .data, as self.weight.data.clamp_(): after other writes, autograd refuses the backwards that still wait; "
    "one that writes into a buffer, as self.count.add_(1), computes with self.count.clone()"
)
_Bounds = tuple[float | None, float | None]  # the largest norm of a stage's gradient, and of its entries
_Step = tuple[StageGroup, int, Sequence[Options], When | None]  # who steps, and with the options of which micro-batch


class Worker:
    """The stages `stages` (all of a pipeline, or one worker's) under `method`, exchanging tensors through `link`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        method: Method,
        delays: Sequence[int],
        link: StageLink,
        executor: Callable[[Worker], Executor],
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        samples: bool = False,
        check_finite: bool = False,
        replicas: Replicas | None = None,
        residence: WeightProvider | None = None,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.count = stages[0].stages
        self.method, self.delays, self.link, self.replicas = method, delays, link, replicas
        self.clip_norm, self.clip_value, self.samples, self.check_finite = clip_norm, clip_value, samples, check_finite
        # updates whose sums are being computed, by stage
        self._due: dict[int, tuple[int, _Bounds, SummedUpdate, Callable[[], Tensor]]] = {}
        self.watch: Watch | None = None
        self.options: dict[int, Options] = {}  # by micro-batch, until F of the last own stage is done
        self.entries: dict[int, int] = {}  # the version of stage 0 at which a micro-batch entered
        self.pauses = False  # whether losses are computed outside, that of the newest micro-batch after a pause
        self.start = self.base = self.entered = 0  # entered: updates of stage 0, counted in the order
        self.given = 0  # micro-batches of all pushes; 0 where updates do not follow from them alone
        self.report: Callable[[int, Tensor], None] = lambda mb, loss: None  # called by the last stage
        self.sizes: dict[int, int] = {}  # samples of each micro-batch, if these weight the mean
        self.ledger = Ledger()
        self.began: Callable[[tuple[str, int | str, int]], None] | None = None  # before (kind, stage or stages, mb)
        self.tracing = False
        self.early: tuple[int, int] | None = None  # (stage, micro-batch) whose F was done before its turn
        self.placed_by: Placed | None = None  # the schedule, if it says what each worker does
        self.in_flushes = False  # whether nothing is in flight when a push ends, or a step where losses are outside
        self.failed: tuple[str, int, int] | None = None  # the operation that has raised (its kind, stage, micro-batch)
        self.trace: list[tuple[float, float, int, str, int]] = []  # (start, end, stage, kind, micro-batch), seconds
        self.stash = method.copies == "stash"
        self.residence = residence or ResidentWeights(self.stages, method)
        self.residence.ask, self.residence.chosen.failure = self._asked, self.failure
        self.update_hook = overrides(method, "update")
        self._steps: dict[tuple[bool, tuple[int, ...]], list[StageGroup]] = {}  # groups that are updated together
        self._alone = {s.index: StageGroup([s], delays) for s in stages}  # always the same: it may count steps
        self._hooks: dict[tuple[int, ...], list[StageGroup]] = {}  # groups that share one call of a hook
        self.first, self.last = min(self.stages), max(self.stages)
        self.judges = self.stages[self.last].judges  # whether it computes the losses
        self.outside = OptimizerStateWatch(stages, method), WeightWriteWatch(stages)  # they notice changes by the user
        self.executor = executor(self)
        self.whole = self.executor.whole or ("" if self.residence.joins else "its weights live in a store")
        self.split = None if self.whole else self.executor.split

    def look(self) -> None:
        """Note that micro-batches may have come, and that the user may have changed optimizers or their state."""
        self.executor.look()

    def land(self) -> None:
        """Let the stages know of whole ticks that were done."""
        self.executor.land()

    def placed(self, s: int, value: Any) -> Any:
        """Return an input or a target that comes in for stage s: if stages run as one, on its device; else the stage
        brings it there.
        """
        return to_device(self.stages[s].device, value) if self.executor.as_one else value

    def record(self, on: bool) -> None:
        """Measure every operation from now on."""
        self.executor.record(on)
        self.trace, self.tracing = [] if on else self.trace, on
        self.residence.record(on)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, waves: Iterable[Wave]) -> None:
        """Do the own part of every wave, in order."""
        mine, alone = self.stages, len(self.stages) == self.count
        entry = self.method.needs_entry
        joined = self._joined()
        for kind, ops in self.residence.ahead(waves):
            if entry:
                self._follow(kind, ops)
            if not alone:
                ops = [op for op in ops if op[0] in mine]
                if not ops:
                    continue
            do = self.forward if kind == "F" else self.backward if kind == "B" else self._update
            if kind in ("I", "W"):
                do = self.of_input if kind == "I" else self.of_weights
            if joined is not None and kind in ("F", "B"):
                (joined.forward if kind == "F" else joined.backward)(ops)
            elif not self.tracing and self.replicas is None:
                if kind in ("B", "I") and (self.executor.apart or self.placed_by is not None):
                    for op in ops:
                        do([op])
                else:
                    do(ops)
            elif self.executor.as_one and kind != "U":
                for s, i in ops:
                    self._await(kind, s, i)
                    self.settle(s)
                do(ops)
            else:
                for s, i in ops:
                    self._await(kind, s, i)  # so that waiting does not count as working
                    self.settle(s)
                    self.residence.ready(kind, s, i)
                    if kind == "U" and self.replicas is not None:
                        do([(s, i)])  # this only begins it; `settle` does it
                    else:
                        self._measured(do, s, kind, i)

    def _joined(self) -> JoinedOperations | None:
        """What does F and B of several stages at once; None: each stage does its own."""
        joined = self.executor.joined
        free = not self.tracing and self.replicas is None and self.watch is None
        able = free and (self.placed_by is not None or self.in_flushes)
        return joined if able or (joined is not None and any(joined.flying)) else None

    def _await(self, kind: str, s: int, i: int) -> None:
        """Wait for the input of an operation from another worker."""
        if kind == "F" or (kind in ("B", "I") and not self.stages[s].judges):
            self.link.wait("F" if kind == "F" else "B", s, i)

    def _measured(self, do: Callable[[Ops], None], s: int, kind: str, i: int) -> None:
        begin = time.perf_counter()
        do([(s, i)])
        if self.tracing:
            self.trace.append((begin, time.perf_counter(), s, kind, i))

    def _follow(self, kind: str, ops: Ops) -> None:
        for s, i in ops:
            if s == 0 and kind == "U":
                self.entered += 1
            elif s == 0 and kind == "F":
                self.entries[i] = self.entered

    def forward(self, ops: Ops) -> None:
        """Do F of each (stage, micro-batch), in the order given."""
        stages, residence = self.stages, self.residence
        if self.watch is not None:
            self.watch.before_forward(ops)
        held = residence.forward(ops)
        try:
            flights = self.executor.forward(ops)
            if self.watch is not None:
                self.watch.forward([(stages[s], i) for s, i in ops])
        finally:
            if held:
                residence.after_forward(held, ops)
        numbers, mbs = zip(*ops, strict=True)
        self.ledger.add("F", numbers, mbs, [flight.version for flight in flights])
        if self.method.needs_entry:
            for (s, i), flight in zip(ops, flights, strict=True):
                flight.entry = self.entries.pop(i) if s == self.last else self.entries[i]
        if self.stash and held:  # flights may have got weights of their own
            for s in numbers:
                stages[s].versions.note_copies(stages[s].flights)

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch)."""
        self._backward("B", ops, self.executor.backward)

    def of_input(self, ops: Ops) -> None:
        """Do I of each (stage, micro-batch); in records it stands for B, since W needs no weights."""
        assert self.split is not None
        self._backward("I", ops, self.split.of_input)

    def of_weights(self, ops: Ops) -> None:
        """Do W of each (stage, micro-batch)."""
        assert self.split is not None
        if self.began is not None:
            self.began(("W", *ops[-1]))
        self.split.of_weights(ops)

    def _backward(self, kind: Kind, ops: Ops, do: Callable[[Ops], None]) -> None:
        stages = self.stages
        if self.watch is not None:
            self.watch.backward([(stages[s], i) for s, i in ops])
        held, versions = self.residence.backward(ops)
        if self.began is not None:
            self.began((kind, *ops[-1]))
        try:
            do(ops)
        finally:
            if held:
                self.residence.after_backward(held)
        numbers, mbs = zip(*ops, strict=True)
        self.ledger.add("B", numbers, mbs, [versions.get(s, stages[s].version) for s in numbers])
        if self.stash:
            for s in numbers:
                stages[s].release()

    def _update(self, ops: Ops) -> None:
        if self.replicas is None:
            self.update(ops)
        else:
            self.executor.spread()
            for s, i in ops:
                self.residence.collect(self.stages[s])
                turn = SummedUpdate.of(s, self.stages[s].version, self.given)
                summing = self.replicas.start(s, self.stages[s].gradients.packed(turn))
                self._due[s] = i, (self.clip_norm, self.clip_value), turn, summing
                if not self.residence.joins:
                    self.settle(s)  # a prefetch must know of every update

    def settle(self, stage: int | None = None) -> None:
        """Do the update of a stage (of all) whose gradients the replicas were still summing.

        It is put off until the stage's next operation, so that other stages work meanwhile.
        """
        self.executor.spread()
        for s in list(self._due) if stage is None else [stage] if stage in self._due else ():
            mb, bounds, turn, arrive = self._due.pop(s)
            sums = arrive()
            try:
                turn.check(self.stages[s].gradients.unpack(sums, len(turn)))
            except OtherBatch as error:
                raise self.failure("update", self.stages[s], mb, error) from error
            self._measured(partial(self.update, bounds=bounds), s, "U", mb)

    def update(self, ops: Ops, bounds: _Bounds | None = None) -> None:
        """Do U of each (stage, micro-batch), as one step if method and optimizers allow it. bounds: those from when it
        was begun; None: it begins now.
        """
        ops = self.executor.update(ops)
        if not ops:
            return
        numbers = tuple([s for s, _ in ops])
        stages = [self.stages[s] for s in numbers]
        if self.began is not None:
            self.began(("U", *ops[0]))
        listened = bool([stage for stage in stages if hooked(stage.optimizer)])
        teams = self._steps.get((listened, numbers))
        if teams is None:
            joined = joinable([s.optimizer for s in stages]) and (self.method.merges or not self.update_hook)
            # from a store, several come only if they run as one
            together = self.residence.joins or len(stages) > 1
            teams = self._steps[listened, numbers] = self._teams(stages, joined and together)
        last = dict(ops)
        steps = [self._planned(team, last[team.first.index]) for team in teams]
        kept = [stage.keep() for stage in stages] if self.stash else []
        after = [stage.version + 1 for stage in stages] if self.method.needs_used else []
        bounds = bounds or (self.clip_norm, self.clip_value)  # another thread may make it later, at other bounds
        self.residence.update(stages, partial(self._make, stages, last, steps, bounds, kept, after))
        for stage in stages:
            stage.updated()

    def _planned(self, team: StageGroup, mb: int) -> _Step:
        options = [stage.options for stage in team.stages]
        when = team.when(mb, options, self.start, self.base, 0) if self.update_hook else None
        if when is not None and self.method.needs_used:
            when = when._replace(used=team.handed())
        return team, mb, options, when

    def _make(
        self,
        stages: Sequence[Stage],
        mbs: dict[int, int],
        steps: Sequence[_Step],
        bounds: _Bounds,
        kept: Sequence[Weights | None],
        after: Sequence[int],
        sums: Sequence[GradientSums],
    ) -> None:
        """Do the update of these stages, whose gradients sum up to `sums`, where their weights are.

        kept: where the weights before the update are copied to. after: the versions that it makes, if it is handed the
        weights that F used.
        """
        grads: dict[int, Sequence[Tensor | None]] = {}
        with torch.no_grad():
            for stage, summed in zip(stages, sums, strict=True):
                try:
                    grads[stage.index], clipped = stage.average(summed, *bounds)
                    if self.watch is not None:
                        self.watch.before_update(stage, clipped)
                except Exception as error:
                    raise self.failure("update", stage, mbs[stage.index], error) from error
            pairs = zip(kept, stages, strict=False)
            copy_all((older, stage.weights) for older, stage in pairs if older is not None)
            for step in steps:
                team = step[0]
                team.put([g for stage in team.stages for g in grads[stage.index]], whole=step[3] is not None)
                try:
                    self._step(*step)
                finally:
                    team.take_back()
            for stage, version in zip(stages, after, strict=bool(after)):
                stage.versions.hand_back(version, stage.flights)
            forget_casts()
            if self.watch is not None:
                for stage in stages:
                    self.watch.after_update(stage)

    def _step(self, team: StageGroup, mb: int, options: Sequence[Options], when: When | None) -> None:
        optimizer = team.optimizer.at(options)
        try:
            if when is None:
                optimizer.step()
                return
            before = team.state
            with optimizer.heard(self.method.steps_itself):
                after = self.method.update(team.weights, optimizer, before, when)
            if after is not before:
                team.state = state_of(self.method, "update", after)
        except Exception as error:
            raise self.failure("update", team.first, mb, error) from error

    def _teams(self, stages: Sequence[Stage], joined: bool) -> list[StageGroup]:
        some = [stage for stage in stages if stage.weights]
        if joined:
            return [StageGroup(some, self.delays)] if some else []
        # always the same group per stage: its optimizer may count its steps
        return [self._alone[stage.index] for stage in some]

    # -- which weights F and B run on ----------------------------------------------------------------------------

    def _asked(self, kind: Kind, ops: Ops) -> list[HookCall]:
        """Return the calls of hooks before these operations; one call may serve several stages."""
        mbs = dict(ops)
        asked = []
        for team in self._served(ops):
            i, stage = mbs[team.first.index], team.first
            if kind == "F":
                options, entry = [self.options[mbs[s.index]] for s in team.stages], self.entries.get(i, 0)
            else:
                options, entry = [s.flights[mbs[s.index]].options for s in team.stages], stage.flights[i].entry
            asked.append(HookCall(team, i, team.when(i, options, self.start, self.base, entry)))
        return asked

    def _served(self, ops: Ops) -> list[StageGroup]:
        """Return the groups of stages that one call of a hook serves: all stages of the wave, or each by itself."""
        numbers = tuple([s for s, _ in ops])
        teams = self._hooks.get(numbers)
        if teams is None:
            joined = self.method.merges and not self.stash and self.residence.joins
            teams = self._hooks[numbers] = self._teams([self.stages[s] for s in numbers], joined)
        return teams

    def failure(self, what: str, stage: Stage, mb: int, error: BaseException) -> StageError:
        """Remember the operation that failed, and return an error that names it."""
        self.failed = what, stage.index, mb
        cure = _WRITTEN if what == "backward" and "modified by an inplace operation" in str(error) else ""
        return StageError(f"{stage.label}, micro-batch {mb}: the {what} failed: {error}{cure}", what, stage.index, mb)
