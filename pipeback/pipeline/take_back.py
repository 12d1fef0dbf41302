"""Take back: leaves out a push that has failed although stages have gone on meanwhile, as if it had never come.

    state A ── push ── push ── … ── state B ── push ── push (fails) ── push     what is kept of a training
                                    state B ── push ────────────────── push     what is trained again

A state is kept every N pushes, and the data of the pushes since. Micro-batches stay in flight for a while, so that one
of before state B may fail after it: the state before is kept until all that came before state B is done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from pipeback.errors import PushLeftOut, StageError
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.kept_pushes import Clip, HandedLoss, KeptPush
from pipeback.pipeline.progress import Progress
from pipeback.pipeline.saving import Saving
from pipeback.pipeline.write_check import WriteCheck
from pipeback.runtime.ledger import Ledger
from pipeback.runtime.loop import Batch
from pipeback.runtime.runners import PushLoop, Threads
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.module_settings import Settings
from pipeback.tensors import accelerators


class _State(NamedTuple):
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


class TakeBack:
    """Keeps states of an engine, and goes back to one. every: pushes between two states."""

    def __init__(self, engine: Engine, saving: Saving, every: int) -> None:
        self._engine, self._saving, self._every = engine, saving, every
        self._states: list[_State] = []  # the last one, and the one before it as long as it is needed
        self._pushes: list[KeptPush] = []  # those since the first of these states
        self._next = 0  # pushes until the next state
        self._now: KeptPush | None = None  # the push that is being let in
        self._busy = False
        self._check = WriteCheck(engine.stages)
        self._settings = self._look()

    # -- while nothing fails -------------------------------------------------------------------------------------

    def push(self, x: Value, y: Any, then: Callable[[], object]) -> Tensor:
        """Do what `Engine.push` does. If a push has failed, this one is trained all the same, before that is told."""
        with self._engine.lock:
            told: PushLeftOut | None = None
            while True:
                self._now = None
                try:
                    self._heed_writes()
                    loss = self._engine.push(x, y, then)
                    break
                except PushLeftOut as error:
                    if told is not None:  # one after the other
                        error.pushes = *told.pushes, *error.pushes
                        error.add_note(str(told))
                    told = error
                    if self._now is None:
                        continue  # it has not been let in yet
                    if self._now.loss.error is None:
                        assert self._now.loss.now is not None
                        loss = self._now.loss.put(self._now.loss.now)
                    break
                except BaseException:
                    now = self._now
                    if now is not None and self._engine.arrived == now.first and self._pushes[-1:] == [now]:
                        del self._pushes[-1]  # it was not let in
                    raise
                finally:
                    came, self._now = self._now, None
            if told is None:
                return loss
            if came is not None and came.loss.error is None:
                told.loss = loss
            raise told

    def note(self, batches: Sequence[Batch]) -> None:
        """Keep a push that is about to be let in, and the state before it, if that is due."""
        engine = self._engine
        if self._next == 0:
            self._keep_state()
            self._next = self._every
        self._next -= 1
        if self._settings.changed():
            self._settings = self._look()
        push = KeptPush(
            batches, engine.progress.pushes, engine.arrived, len(batches) // len(engine.holding.everywhere),
            engine.current, self._settings, self._clip(), HandedLoss(self._heal),
        )  # fmt: skip
        self._pushes.append(push)
        self._now = push
        self._check.works()

    def handed(self, loss: Tensor) -> Tensor:
        """The loss of the push that was let in last, as the user gets it."""
        if isinstance(self._engine.runtime, PushLoop):
            self.rests()
        return self._pushes[-1].loss.put(loss)

    def rests(self) -> None:
        """Nothing works until the next call."""
        if not self._busy:
            self._check.rests()

    def forget(self) -> None:
        """What came until now cannot be taken back, or is done."""
        self._states, self._pushes, self._next = [], [], 0
        self._check.works()

    def _heed_writes(self) -> None:
        """Keep a state before the next push if the user has written something that training again would not repeat."""
        written = self._check.optimizers
        if not written and self._check.weights:
            self._engine.join()
            written = self._check.weights
        if written:
            self.forget()

    def _keep_state(self) -> None:
        engine = self._engine
        engine.wait()
        done = self._done()
        flights = [push for push in self._pushes if push.first + push.count > done]
        if self._states and any(push.settings is not self._settings for push in flights):
            return  # modules were set otherwise meanwhile: not all graphs in flight could be built anew
        if len(self._states) == 2:
            if done < self._states[1].arrived:
                return  # the first one may still be needed
            del self._states[0]
            self._pushes = [push for push in self._pushes if push.first >= self._states[0].arrived]
        try:
            state = self._saving.state_dict()
        except Exception as error:
            error.add_note("debug=pipeback.Debug(take_back=...) keeps states in memory; leave take_back out")
            raise
        workers = [loop.worker for loop in engine.loops]
        records = [(w.ledger, w.ledger.mark(), w.trace, len(w.trace)) for w in workers]
        self._states.append(
            _State(
                state, engine.arrived, copy.copy(engine.progress), engine.losses.mark(), records, self._settings,
                self._clip(),
            )
        )  # fmt: skip
        self._check.remember()

    def _done(self) -> int:
        """How many micro-batches are done at all stages, in all replicas."""
        found = [self._engine.arrived]
        for loop in self._engine.loops:
            if not loop.fresh:
                found.append(loop.order.start + min(loop.order.updated))
        return min(found)

    def _look(self) -> Settings:
        modules = list(self._engine.settable())
        return Settings.joined([Settings(modules, "modes"), Settings(modules)])

    def _clip(self) -> Clip:
        options = self._engine.setting.worker
        return options["clip_norm"], options["clip_value"]

    # -- when something has failed -------------------------------------------------------------------------------

    def recover(self, error: BaseException) -> None:
        """Go back and train again without the push that has failed, and tell by `PushLeftOut`, or KeyboardInterrupt.

        Returns if that cannot be done.
        """
        if self._busy:
            return
        stopped = isinstance(error, KeyboardInterrupt)
        bad = self._now if stopped else self._of(error, self._pushes)
        if not self._states or (bad is None and not stopped):
            return
        self._busy = True
        try:
            left = self._train_without([] if bad is None else [bad])
        except BaseException as failure:
            self._engine.error = failure
            raise
        finally:
            self._busy = False
        self._tell(error, left)

    def _tell(self, error: BaseException, left: list[KeptPush]) -> None:
        numbers = tuple(sorted(push.number for push in left))
        which = f"push {numbers[0]} was" if len(numbers) == 1 else f"pushes {', '.join(map(str, numbers))} were"
        rest = f"{which} left out, as if it had not come" if left else "nothing was left out"
        rest += ", and training goes on: every other push is trained, the last one, too; repeat any other call"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{str(error) or 'stopped'}; {rest}") from error
        assert isinstance(error, StageError)
        told = PushLeftOut(f"{error}; {rest}", error.operation, error.stage, error.micro_batch, numbers)
        for push in left:
            push.loss.error = told
        raise told from error

    @staticmethod
    def _of(error: BaseException, among: Sequence[KeptPush]) -> KeptPush | None:
        """The push of which an operation has failed."""
        mb = error.micro_batch if isinstance(error, StageError) else None
        return next((push for push in among if mb in push), None)

    def _train_without(self, left: list[KeptPush]) -> list[KeptPush]:
        """Go back and train all kept pushes again but those in `left`; return these with others that fail now."""
        now, clip = self._look(), self._clip()
        while True:
            first = min((push.first for push in left), default=self._engine.arrived)
            while len(self._states) > 1 and self._states[-1].arrived > first:
                del self._states[-1]
            since = self._states[-1].arrived
            again = [push for push in self._pushes if push.first >= since and push not in left]
            before = [push for push in self._pushes if push.first < since]
            numbers = [push.first for push in again], [push.number for push in again]
            try:
                self._go_back(self._states[-1])
                for push in again:
                    self._train(push)
                self._set(now, clip)
                break
            except StageError as error:
                bad = self._of(error, [*before, *again])
                for push, mb, number in zip(again, *numbers, strict=True):
                    push.first, push.number = mb, number
                if bad is None:
                    raise
                left = [*left, bad]
        self._pushes = [*before, *again]
        self._next = max(0, self._every - len(again))
        return left

    def _go_back(self, to: _State) -> None:
        engine = self._engine
        traces = [loop.worker.trace for loop in engine.loops]
        engine.stop()
        engine.error = None
        to.settings.put()
        engine.setting.worker.update(clip_norm=to.clip[0], clip_value=to.clip[1])
        self._saving.put_back(to.state)
        vars(engine.progress).update(vars(to.progress))
        engine.losses.go_back(to.losses)
        for loop, (ledger, mark, trace, length), latest in zip(engine.loops, to.records, traces, strict=True):
            ledger.go_back(mark)
            if trace is latest:  # otherwise recording was begun since
                del trace[length:]
            loop.worker.ledger, loop.worker.trace = ledger, latest

    def _train(self, push: KeptPush) -> None:
        """Train on a push again, with what was in force when it came."""
        engine = self._engine
        self._set(push.settings, push.clip)
        push.first, push.number = engine.arrived, engine.progress.pushes
        with accelerators.under(push.autocast):
            try:
                engine.rehearse(push.batches)
            except StageError:  # of what was let in before
                raise
            except Exception as error:
                raise StageError(str(error), None, None, push.first) from error
            engine.like(push.count, push.batches[0][2])
            if not _same(engine.current, push.options):
                engine.current = Options(engine.optimizers, engine.arrived, push.options.groups)
            push.loss.now = engine.let_in(push.batches)()
        with suppress(FloatingPointError):  # it was raised then
            engine.losses.see(push.number, push.loss.now)

    def _set(self, settings: Settings, clip: Clip) -> None:
        engine = self._engine
        if settings.changed():
            engine.wait()
            settings.put()
        if clip != self._clip():
            engine.clip(*clip)

    def _heal(self, loss: HandedLoss, now: Tensor, error: Exception) -> None:
        """A loss has failed: go back, unless that was done meanwhile."""
        with self._engine.lock:
            if loss.now is not now or loss.error is not None:
                return
            runtime = self._engine.runtime
            if self._engine.error is None and isinstance(runtime, Threads) and runtime.failure:
                self._engine.do(runtime.raise_failure)
            raise error


def _same(some: Options, others: Options) -> bool:
    return some is others or some.groups == others.groups
