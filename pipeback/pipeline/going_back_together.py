"""Going back together: how the ranks of a pipeline agree on which push they leave out, and on the state to go back to.

All ranks push the same pushes and make the same other calls in the same order, at times of their own.

1.  Each rank keeps a state of its own part before every N-th push, once it has done what came before. There the ranks
    meet, so that nothing of before the last state but one can fail any more.
2.  Every call but `push` and the reading of a loss ends with a meeting. The store of `Health` decides it: it is held if
    all ranks have come, or called off if one of them has seen a fault first. So such a call returns on all ranks, or
    raises the fault on all; and ranks that are not equally far are so by pushes between the same two meetings.
3.  An operation fails: its rank writes the fault, with the micro-batch, into the store, as it does without `take_back`.
    All waits of all ranks end by it, and every rank learns of it in its next call at the latest.
4.  Each rank stops its loop, leaves, and comes to a new round of `Ranks`, with a new store, new process groups and new
    shared memory. So all links are empty, and no message of before is ever taken. A rank that does not come within the
    timeout, or whose process has ended, is named by a `RankError` on the others.
5.  They gather which states each has, and which push the micro-batch belongs to. They go back to the last state that
    all have and that is not behind this push. If there is none, the pipeline is closed on all of them.
6.  Each rank trains again on the pushes that it was given, without the bad one. A rank that is behind goes on with the
    others when its user pushes them. It notes after which micro-batch the bad push will come, and does not let it in.
7.  Each rank tells its user once, by a `PushLeftOut` with the same number: in the call that has learnt of it or, if the
    bad push comes later, in the call that pushes it.
8.  A second failure, also while they train again, begins a further round. Its numbers are those without the push that
    was left out before.

A fault that is no operation (a rank dies or hangs, batches differ, Ctrl-C) ends all ranks, as without `take_back`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeback.distributed.health.health import Failed, Fault
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.errors import PushLeftOut, RankError, StageError
from pipeback.pipeline.closed_message import BEFORE_THE_STATES
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.kept_training import KeptTraining


class BadPush(NamedTuple):
    """The push that has failed: the number of its first micro-batch, how many it has, and its own number."""

    first: int
    size: int
    number: int


class Agreed(NamedTuple):
    """What all ranks do. since: the micro-batches that had arrived in the state to which they go back."""

    since: int
    bad: BadPush


def operation(ranks: Ranks | SingleProcess) -> Failed | None:
    """The operation of a micro-batch whose failure has ended these ranks; None: something else has, or nothing."""
    fault: Fault | None = ranks.health.fault if isinstance(ranks, Ranks) else None
    failed = None if fault is None else fault.failed
    return None if failed is None or failed.micro_batch is None else failed


def agree(ranks: Ranks | SingleProcess, states: Sequence[int], bad: BadPush | None) -> Agreed | None:
    """Every rank calls it. states: the micro-batches that had arrived in each state that this one keeps. bad: the push
    that has failed, if this rank was given it. Returns None if they cannot go back.
    """
    every = ranks.gather((list(states), bad), "going back")
    found = [theirs for _, theirs in every if theirs is not None]
    if not found:
        return None
    which = max(found)
    common = [since for since in set.intersection(*(set(some) for some, _ in every)) if since <= which.first]
    return Agreed(max(common), which) if common else None


@dataclass
class _Coming:
    first: int
    error: PushLeftOut
    told: bool = False


class ToLeaveOut:
    """Pushes that are left out and that the user of this rank has yet to push, in their order."""

    def __init__(self) -> None:
        self._coming: list[_Coming] = []

    def add(self, bad: BadPush, error: PushLeftOut) -> None:
        """This one is left out, too, before those behind it."""
        self.gone(bad)
        place = sum(coming.first <= bad.first for coming in self._coming)
        self._coming.insert(place, _Coming(bad.first, error))

    def gone(self, bad: BadPush) -> None:
        """The micro-batches of a push are not counted any more."""
        for coming in self._coming:
            if coming.first > bad.first:
                coming.first -= bad.size

    def take(self, arrived: int) -> tuple[PushLeftOut, bool] | None:
        """If the push after `arrived` micro-batches is to be left out: its error, and whether the user knows it."""
        if not self._coming or self._coming[0].first != arrived:
            return None
        coming = self._coming.pop(0)
        return coming.error, coming.told

    def clear(self) -> None:
        self._coming.clear()

    def tell(self, error: PushLeftOut, told: bool) -> bool:
        """Note whether the user was told of it; return whether it is of a push that is yet to come."""
        found = [coming for coming in self._coming if coming.error is error]
        for coming in found:
            coming.told = told
        return bool(found)


class GoingBackTogether:
    """Goes back with the other ranks. kept: what this one keeps. to_leave_out: where it notes what has yet to come."""

    def __init__(self, engine: Engine, kept: KeptTraining, to_leave_out: ToLeaveOut) -> None:
        self._engine, self._kept, self._to_leave_out = engine, kept, to_leave_out

    def recover(self, error: BaseException) -> str:
        """Go back and train again without the push that has failed, and raise the `PushLeftOut` that tells of it.

        Returns why that cannot be done, if no round has been.
        """
        engine, now, traces = self._engine, self._kept.now(), self._kept.traces()
        told: PushLeftOut | None = None  # of pushes that came to this rank
        later: PushLeftOut | None = None
        while (failed := operation(engine.ranks)) is not None:
            agreed = self._agree(failed)
            if agreed is None:
                engine.ranks.leave()
                if told is None and later is None:
                    return BEFORE_THE_STATES
                raise error
            numbers = (agreed.bad.number,)
            left = PushLeftOut(f"{failed.message}; {rest(numbers)}", *failed[1:], numbers)
            if self._leave_out(agreed.bad, left):
                told = after(told, left)
            else:
                later = left
            while self._kept.states[-1].arrived != agreed.since:
                del self._kept.states[-1]
            try:
                self._kept.go_back_together(traces)
                self._kept.put(*now)
            except (StageError, RankError) as failure:
                error = failure
                continue
            if told is None and later is not None:
                self._to_leave_out.tell(later, told=True)
            raise after(told, None if told is not None else later) from error
        if told is not None or later is not None:
            raise error
        return ""

    def _agree(self, failed: Failed) -> Agreed | None:
        """Meet the other ranks anew, and agree on what to do."""
        engine, mb = self._engine, failed.micro_batch
        assert mb is not None
        engine.stop()
        engine.holding.meet_again(back=True)
        bad = next((BadPush(push.first, push.count, push.number) for push in self._kept.pushes if mb in push), None)
        if bad is None and mb == engine.arrived:
            bad = BadPush(mb, 0, engine.progress.pushes)  # it was about to be let in here
        return agree(engine.ranks, [state.arrived for state in self._kept.states], bad)

    def _leave_out(self, bad: BadPush, error: PushLeftOut) -> bool:
        """Leave a push out; return whether it came to this rank, and not only to others."""
        pushes = self._kept.pushes
        mine = [push for push in pushes if push.first == bad.first and push.count == bad.size]
        if not mine:
            self._to_leave_out.add(bad, error)
            return False
        self._to_leave_out.gone(bad)
        pushes.remove(mine[0])
        mine[0].loss.error = error
        return True


def rest(numbers: Sequence[int]) -> str:
    """What is said of pushes with these numbers, which were left out."""
    which = f"push {numbers[0]} was" if len(numbers) == 1 else f"pushes {', '.join(map(str, numbers))} were"
    first = f"{which} left out, as if it had not come" if numbers else "nothing was left out"
    return first + ", and training goes on: every other push is trained, the last one, too; repeat any other call"


def after(told: PushLeftOut | None, error: PushLeftOut | None) -> PushLeftOut:
    """One error for both, where one came after the other and nothing was told between them."""
    if told is None or error is None:
        only = told or error
        assert only is not None
        return only
    error.pushes = *told.pushes, *error.pushes
    error.add_note(str(told))
    return error
