"""Tick loop: the event loop in the order "skewed", in which a push leaves work undone for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from pipeback.runtime.lazy_loss import LazyLoss
from pipeback.runtime.loop import Batch, Loop
from pipeback.runtime.runners import FEW, EventLoop, Read, mean
from pipeback.runtime.undo import Dropped
from pipeback.stages.joint_optimizer import Options


class TickLoop(EventLoop):
    """The event loop in the order "skewed": a push leaves work undone, and its loss is computed when it is read: as far
    as the loss needs it. What remains stays in flight, so that the pipeline is full when the next push comes.

    reach: does remaining work until a condition holds, as a call of the pipeline would.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.reach: Callable[[Callable[[], bool]], None] = self.go_on
        self.due: dict[int, dict[int, Tensor]] = {}  # where the loss of a micro-batch is put, one dictionary per push
        loop.worker.report = self._arrived
        _, weights = loop.worker.outside
        weights.owed = self._owes

    def push(self, first: int, batches: Sequence[Batch], options: Options) -> Read:
        mbs = range(first, first + len(batches))
        losses: dict[int, Tensor] = {}
        self.due.update(dict.fromkeys(mbs, losses))
        loop = self.loop
        # if the last push was waited for, this one will be: then its first forwards may as well go on to the last stage
        few = len(batches) <= FEW and loop.worker.residence.joins  # weights in a store would come for each of them
        loop.order.in_turn = loop.order.apart = loop.awaited and few
        try:
            self.loop.push(batches, options)
        except Dropped:
            for i in range(self.loop.order.arrived, mbs.stop):
                del self.due[i]
            raise

        def read(sizes: list[int] | None) -> Tensor:
            if not known() and not self.closed:
                self.reach(known)
            if not known():
                raise RuntimeError("the pipeline was closed before this loss was computed")
            return mean([losses[i] for i in mbs], sizes)

        def known() -> bool:
            return len(losses) == len(mbs)

        def asked() -> None:  # it may be known already; would it be, had nobody ever waited?
            loop.awaited |= loop.order.arrived < mbs.stop + loop.order.stages - 1

        return lambda sizes: LazyLoss(partial(read, sizes), known, asked)

    def go_on(self, done: Callable[[], bool]) -> None:
        """Do remaining work until `done` says so."""
        with self.as_pushed():
            self.loop.reach(done)

    def _owes(self) -> bool:
        """Whether work may be left of earlier pushes, which nobody has waited for."""
        return not (self.loop.awaited or self.loop.order.empty)

    def _arrived(self, mb: int, loss: Tensor) -> None:
        self.due.pop(mb)[mb] = loss
