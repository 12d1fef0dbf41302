"""Executor: how a worker's operations are done on the weights in place, as protocols."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Ops, Order
from pipeback.schedules.spans import Span
from pipeback.stages.flight import Flight


class SplitOperations(Protocol):
    """How backwards are done in two: I, the gradient of the input, and W, that of the weights."""

    def of_input(self, ops: Ops) -> None:
        """Do I of each (stage, micro-batch)."""

    def of_weights(self, ops: Ops) -> None:
        """Do W of each (stage, micro-batch)."""


class JoinedOperations(Protocol):
    """How a worker does an operation of a micro-batch at several stages at once, where nobody asks for its state."""

    @property
    def flying(self) -> Iterable[dict[int, Any]]:
        """What is in flight, by micro-batch: a dictionary for each run of stages."""
        ...

    def forward(self, ops: Ops) -> None:
        """Do F of each (stage, micro-batch), those of a micro-batch upstream first."""

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch), those of a micro-batch downstream first."""

    def forget(self, first: int) -> None:
        """Drop the micro-batches from `first` on, which are taken back."""

    def output(self, s: int, i: int) -> Any:
        """The output of a stage for a micro-batch in flight, None if it is not kept here."""


class Executor(Protocol):
    """How a worker's operations are done on the weights in place: stage by stage, or those of several stages as one."""

    apart: bool  # whether the backwards of a wave are done one by one
    as_one: bool  # whether the operations of a wave are one call
    split: SplitOperations | None  # does I and W; None: it cannot split a backward
    whole: str  # why it cannot
    joined: JoinedOperations | None  # does F and B of runs of stages; None: at each stage by itself
    by_group: bool  # whether it does groups of micro-batches as a whole
    undoes: bool  # whether a micro-batch whose forward fails can be taken back (`undo`)

    def record(self, on: bool) -> None:
        """Begin or end measuring operations; raises ValueError if they cannot be measured one by one."""

    def leap(self, order: Order, span: Span) -> int:
        """Do as many ticks of a span as possible without any work per stage, or a flush; return their number."""

    def begin_flush(self, first: int, count: int, schedule: Schedule) -> bool:
        """Begin the flush of so many micro-batches, as far as it goes before the newest is judged outside; return
        whether it was begun.
        """

    def begin_turn(self, order: Order) -> bool:
        """Do all forwards of the newest micro-batch as a turn (`schedules/spans`), before it is judged outside; return
        whether that was possible.
        """

    def land(self) -> None:
        """Let stages and worker know of the ticks that were leapt."""

    def look(self) -> None:
        """Note that micro-batches may have come, and that the user may have changed optimizers or their state."""

    def forward(self, ops: Ops) -> list[Flight]:
        """Do F of each (stage, micro-batch); return the new flights, in the same order."""

    def backward(self, ops: Ops) -> None:
        """Do B of each (stage, micro-batch)."""

    def update(self, ops: Ops) -> Ops:
        """Do U of the stages that are updated as one; return the operations that are left."""

    def spread(self) -> None:
        """Hand the stages their gradients, if those of several stages are kept together."""

    def take_up(self) -> None:
        """Go on after a state was put into the stages, and messages into the link."""

    def use(self, stacks: Sequence[Any]) -> None:
        """Run the stages of these stacks as one from now on, and all others one by one."""
