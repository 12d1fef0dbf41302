"""Kept training: states that are kept in memory, and the pushes since, which are trained again after going back to one.

    state A ── push ── push ── … ── state B ── push ── push (fails) ── push     what is kept of a training
                                    state B ── push ────────────────── push     what is trained again

A state is kept every N pushes, and the data of the pushes since. Micro-batches stay in flight for a while, so that one
of before state B may fail after it: the state before is kept until all that came before state B is done.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipeback.errors import RankError, StageError
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.kept_pushes import Clip, HandedLoss, Heal, KeptPush
from pipeback.pipeline.progress import Progress
from pipeback.pipeline.saving import Saving
from pipeback.pipeline.write_check import WriteCheck
from pipeback.runtime.ledger import Ledger
from pipeback.runtime.loop import Batch
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.module_settings import Settings
from pipeback.tensors import accelerators


class State(NamedTuple):
    """A state of the pipeline between two pushes, and what is kept beside it.

    arrived: micro-batches until then. records: of each worker, its ledger, its trace, and how long these were.
    """

    state: dict[str, Any]
    arrived: int
    progress: Progress
    losses: Any
    records: list[tuple[Ledger, int, list[Any], int]]
    settings: Settings
    clip: Clip


class KeptTraining:
    """What is kept of the training of an engine. every: pushes between two states.

    states: the last one, and the one before it as long as it is needed. pushes: those since the first of these states.
    check: whether the user has written what training again would not repeat. settings: in force at the last push.
    """

    def __init__(self, engine: Engine, saving: Saving, every: int) -> None:
        self._engine, self._saving, self._every = engine, saving, every
        self.states: list[State] = []
        self.pushes: list[KeptPush] = []
        self._next = 0  # pushes until the next state
        self._met: int | None = None  # over processes: the push before which the ranks met, or to which they went back
        self.check = WriteCheck(engine.stages)
        self.settings = self.look()

    def note(self, batches: Sequence[Batch], heal: Heal) -> KeptPush:
        """Keep a push that is about to be let in, and the state before it, if that is due."""
        engine = self._engine
        self._keep_what_is_due()
        if self.settings.changed():
            self.settings = self.look()
        push = KeptPush(
            batches, engine.progress.pushes, engine.arrived, len(batches) // len(engine.holding.everywhere),
            engine.current, self.settings, self._clip, HandedLoss(heal),
        )  # fmt: skip
        self.pushes.append(push)
        self.check.works()
        return push

    def heed_writes(self) -> None:
        """Keep a state before the next push if the user has written something that training again would not repeat."""
        written = self.check.optimizers
        if not written and self.check.weights:
            self._engine.join()
            written = self.check.weights
        if written:
            self.forget()

    def forget(self) -> None:
        """What came until now cannot be taken back, or is done."""
        self.states, self.pushes, self._next = [], [], 0
        self.check.works()

    def _keep_what_is_due(self) -> None:
        if self._engine.ranks.several:  # at the same pushes on all ranks, wherever they went back to
            number = self._engine.progress.pushes
            together = number % self._every == 0 and number != self._met
            if together or self._next == 0:
                self._keep_state(together)
            self._next = 1
            return
        if self._next == 0:
            self._keep_state()
            self._next = self._every
        self._next -= 1

    def _keep_state(self, together: bool = False) -> None:
        engine = self._engine
        engine.wait()
        if together:
            engine.ranks.meet("push()")
            self._met = engine.progress.pushes
        done = self._done()
        flights = [push for push in self.pushes if push.first + push.count > done and push.first < engine.arrived]
        if self.states and any(push.settings is not self.settings for push in flights):
            return  # modules were set otherwise meanwhile: not all graphs in flight could be built anew
        if len(self.states) == 2:
            if done < self.states[1].arrived:
                return  # the first one may still be needed
            del self.states[0]
            self.pushes = [push for push in self.pushes if push.first >= self.states[0].arrived]
        try:
            state = self._saving.kept()
        except Exception as error:
            error.add_note("debug=pipeback.Debug(take_back=...) keeps states in memory; leave take_back out")
            raise
        workers = [loop.worker for loop in engine.loops]
        records = [(w.ledger, w.ledger.mark(), w.trace, len(w.trace)) for w in workers]
        self.states.append(
            State(
                state, engine.arrived, copy.copy(engine.progress), engine.losses.mark(), records, self.settings,
                self._clip,
            )
        )  # fmt: skip
        self.check.remember()

    def _done(self) -> int:
        """How many micro-batches are done at all stages, in all replicas."""
        found = [self._engine.arrived]
        for loop in self._engine.loops:
            if not loop.fresh:
                found.append(loop.order.start + min(loop.order.updated))
        return min(found)

    def look(self) -> Settings:
        """The settings of modules that are in force now."""
        modules = list(self._engine.settable())
        return Settings.joined([Settings(modules, "modes"), Settings(modules)])

    @property
    def _clip(self) -> Clip:
        options = self._engine.setting.worker
        return options["clip_norm"], options["clip_value"]

    # -- going back ----------------------------------------------------------------------------------------------

    def now(self) -> tuple[Settings, Clip]:
        """What is in force now, to be put back by `put`."""
        return self.look(), self._clip

    def put(self, settings: Settings, clip: Clip) -> None:
        """Put something in force from the next push on."""
        engine = self._engine
        if settings.changed():
            engine.wait()
            settings.put()
        if clip != self._clip:
            engine.clip(*clip)

    def since(self, arrived: int) -> list[KeptPush]:
        """The pushes to be trained again after going back to the state of so many micro-batches."""
        return [push for push in self.pushes if push.first >= arrived]

    def trained_again(self, count: int) -> None:
        """So many pushes have been trained since the last state."""
        self._next = max(0, self._every - count)

    def traces(self) -> list[list[Any]]:
        """Those of each worker, which stay the user's when the workers are replaced."""
        return [loop.worker.trace for loop in self._engine.loops]

    def go_back(self, traces: list[list[Any]]) -> None:
        """Go back to the last state. traces: those of the workers until now."""
        engine, to = self._engine, self.states[-1]
        engine.stop()
        engine.error = None
        to.settings.put()
        engine.setting.worker.update(clip_norm=to.clip[0], clip_value=to.clip[1])
        self._saving.put_back(to.state)
        self.check.works()  # this has written into optimizers, and not the user
        vars(engine.progress).update(vars(to.progress))
        engine.losses.go_back(to.losses)
        for loop, (ledger, mark, trace, length), latest in zip(engine.loops, to.records, traces, strict=True):
            ledger.go_back(mark)
            if trace is latest:  # otherwise recording was begun since
                del trace[length:]
            loop.worker.ledger, loop.worker.trace = ledger, latest

    def go_back_together(self, traces: list[list[Any]]) -> None:
        """As `go_back`, over processes, and train again; states that fall due meanwhile are kept, as on other ranks."""
        to = self.states[-1]
        again = self.since(to.arrived)
        first = to.arrived
        for number, push in enumerate(again, to.progress.pushes):
            push.first, push.number, first = first, number, first + push.count
        self.settings, self._met = to.settings, to.progress.pushes
        self.go_back(traces)
        for push in again:
            self.train(push)
            self.settings = push.settings

    def train(self, push: KeptPush) -> None:
        """Train on a push again, with what was in force when it came."""
        engine = self._engine
        self.put(push.settings, push.clip)
        push.first, push.number = engine.arrived, engine.progress.pushes
        with accelerators.under(push.autocast):
            try:
                engine.rehearse(push.batches)
            except (StageError, RankError):  # of what was let in before, or of another rank
                raise
            except Exception as error:
                raise StageError(str(error), None, None, push.first) from error
            engine.like(push.count, push.batches[0][2])
            if not _same(engine.current, push.options):
                engine.current = Options(engine.optimizers, engine.arrived, push.options.groups)
            if engine.ranks.several:
                self._keep_what_is_due()
            push.loss.now = engine.let_in(push.batches)()
        with suppress(FloatingPointError):  # it was raised then
            engine.losses.see(push.number, push.loss.now)


def _same(some: Options, others: Options) -> bool:
    return some is others or (some.same_weights(others.groups) and some.groups == others.groups)
