"""Take back: leaves out a push that has failed although stages have gone on meanwhile, as if it had never come.

`kept_training` says what is kept for it. Over processes, `going_back_together` says how the ranks agree.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from torch import Tensor

from pipeback.distributed.health.health import script_error
from pipeback.distributed.rank_runner import RankRunner
from pipeback.distributed.ranks import Ranks
from pipeback.errors import PushLeftOut, StageError
from pipeback.pipeline.closed_message import BEFORE_THE_STATES
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.going_back_together import GoingBackTogether, ToLeaveOut, after, rest
from pipeback.pipeline.kept_pushes import HandedLoss, KeptPush
from pipeback.pipeline.kept_training import KeptTraining
from pipeback.pipeline.saving import Saving
from pipeback.runtime.loop import Batch
from pipeback.runtime.runners import PushLoop, Threads
from pipeback.stages.flight import Value


class TakeBack:
    """Keeps states of an engine, and goes back to one. every: pushes between two states."""

    def __init__(self, engine: Engine, saving: Saving, every: int) -> None:
        self._engine, self._kept = engine, KeptTraining(engine, saving, every)
        self._to_leave_out = ToLeaveOut()
        self._together = GoingBackTogether(engine, self._kept, self._to_leave_out)
        self._now: KeptPush | None = None  # the push that is being let in
        self._busy = False
        if isinstance(engine.ranks, Ranks):
            engine.ranks.goes_back, engine.ranks.guard = True, _weakly(engine)
            # before `RankRunner`, which only waits
            at_exit = Finalize(None, _finish, args=(weakref.ref(self),), exitpriority=21)
            weakref.finalize(self, at_exit.cancel).atexit = False

    # -- while nothing fails -------------------------------------------------------------------------------------

    def push(self, x: Value, y: Any, then: Callable[[], object]) -> Tensor:
        """Do what `Engine.push` does. If a push has failed, this one is trained all the same, before that is told."""
        with self._engine.lock:
            told: PushLeftOut | None = None
            while True:
                self._now = None
                if (left := self._to_leave_out.take(self._engine.arrived)) is not None:
                    return self._not_let_in(*left, told)
                try:
                    self._kept.heed_writes()
                    loss = self._engine.push(x, y, then)
                    break
                except PushLeftOut as error:
                    if not self._to_leave_out.tell(error, told=False):
                        told = after(told, error)
                    if self._now is None:
                        continue  # it has not been let in yet
                    if self._now.loss.error is None:
                        assert self._now.loss.now is not None
                        loss = self._now.loss.put(self._now.loss.now)
                    break
                except BaseException:
                    now = self._now
                    if now is not None and self._engine.arrived == now.first and self._kept.pushes[-1:] == [now]:
                        del self._kept.pushes[-1]  # it was not let in
                    raise
                finally:
                    came, self._now = self._now, None
            if told is None:
                return loss
            if came is not None and came.loss.error is None:
                told.loss = loss
            raise told

    def _not_let_in(self, error: PushLeftOut, known: bool, told: PushLeftOut | None) -> Tensor:
        """A push that other ranks have left out before it came here. known: whether the user has been told."""
        if not known or told is not None:
            raise after(told, None if known else error)
        loss = HandedLoss(self._heal)
        loss.error = error
        return loss.lazy()

    def note(self, batches: Sequence[Batch]) -> None:
        """Keep a push that is about to be let in, and the state before it, if that is due."""
        self._now = self._kept.note(batches, self._heal)

    def handed(self, loss: Tensor) -> Tensor:
        """The loss of the push that was let in last, as the user gets it."""
        if isinstance(self._engine.runtime, PushLoop):
            self.rests()
        return self._kept.pushes[-1].loss.put(loss)

    def rests(self) -> None:
        """Nothing works until the next call."""
        if not self._busy:
            self._kept.check.rests()

    def forget(self) -> None:
        """What came until now cannot be taken back, or is done."""
        self._kept.forget()
        self._to_leave_out.clear()

    def settle(self, what: str, *, warn: bool = True) -> None:
        """Return when what was pushed is done on all ranks; warn of pushes that are left out. what: the call."""
        while True:
            try:
                self._engine.wait()
                self._engine.ranks.meet(what)
                return
            except PushLeftOut as error:
                if warn:
                    warnings.warn(str(error), stacklevel=4)

    # -- when something has failed -------------------------------------------------------------------------------

    def recover(self, error: BaseException) -> str:
        """Go back and train again without the push that has failed, and tell by `PushLeftOut`, or KeyboardInterrupt.

        Returns why that cannot be done, for the message of the closed pipeline.
        """
        if isinstance(error, PushLeftOut):
            raise error  # all is well again
        if self._busy:
            return ""
        stopped = isinstance(error, KeyboardInterrupt)
        self._busy = True
        try:
            if self._engine.ranks.several:
                return "" if stopped else self._together.recover(error)
            bad = self._now if stopped else self._of(error, self._kept.pushes)
            if not self._kept.states or (bad is None and not stopped):
                return BEFORE_THE_STATES
            left = self._train_without([] if bad is None else [bad])
        except PushLeftOut:
            raise
        except BaseException as failure:
            self._engine.error = failure
            raise
        finally:
            self._busy = False
        return self._tell(error, left)

    def _tell(self, error: BaseException, left: list[KeptPush]) -> NoReturn:
        numbers = tuple(sorted(push.number for push in left))
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{str(error) or 'stopped'}; {rest(numbers)}") from error
        assert isinstance(error, StageError)
        told = PushLeftOut(f"{error}; {rest(numbers)}", error.operation, error.stage, error.micro_batch, numbers)
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
        kept, now = self._kept, self._kept.now()
        while True:
            first = min((push.first for push in left), default=self._engine.arrived)
            while len(kept.states) > 1 and kept.states[-1].arrived > first:
                del kept.states[-1]
            since = kept.states[-1].arrived
            again = [push for push in kept.since(since) if push not in left]
            before = [push for push in kept.pushes if push.first < since]
            numbers = [push.first for push in again], [push.number for push in again]
            try:
                kept.go_back(kept.traces())
                for push in again:
                    kept.train(push)
                kept.put(*now)
                break
            except StageError as error:
                bad = self._of(error, [*before, *again])
                for push, mb, number in zip(again, *numbers, strict=True):
                    push.first, push.number = mb, number
                if bad is None:
                    raise
                left = [*left, bad]
        kept.pushes = [*before, *again]
        kept.trained_again(len(again))
        return left

    def _heal(self, loss: HandedLoss, now: Tensor, error: Exception) -> None:
        """A loss has failed: go back, unless that was done meanwhile."""
        with self._engine.lock:
            if loss.now is not now or loss.error is not None:
                return
            runtime = self._engine.runtime
            failed = isinstance(runtime, RankRunner) or (isinstance(runtime, Threads) and runtime.failure)
            if self._engine.error is None and failed and isinstance(runtime, RankRunner | Threads):
                try:
                    self._engine.do(runtime.raise_failure)
                except PushLeftOut as left:
                    if self._to_leave_out.tell(left, told=False):
                        return  # the user learns of it when the push comes
                    raise
            raise error


def _weakly(engine: Engine) -> Callable[[Callable[[], object]], None]:
    """The guard of an engine, which it does not keep alive."""
    guard = weakref.WeakMethod(engine.guard)

    def call(meet: Callable[[], object]) -> None:
        there = guard()
        if there is None:
            meet()
        else:
            there(meet)

    return call


def _finish(kept: weakref.ref[TakeBack]) -> None:
    """Before the script ends: nothing is told any more, but other ranks may have to go back."""
    own = kept()
    if own is not None and own._engine.error is None and own._engine.runtime is not None and script_error() is None:
        with suppress(Exception):
            own.settle("the end of the script")
