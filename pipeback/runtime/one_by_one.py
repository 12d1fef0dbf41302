"""One by one: what an executor does not do that does each operation by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeback.schedules.ops import Schedule
from pipeback.schedules.order import Ops, Order
from pipeback.schedules.spans import Span


class OneByOne:
    """The part of an `Executor` that is for operations of several stages or micro-batches at once."""

    as_one = False  # each operation is a call
    by_group = False

    def record(self, on: bool) -> None:
        """Do nothing: the worker measures each operation."""

    def leap(self, order: Order, span: Span) -> int:
        """Return 0: each operation is done by itself."""
        return 0

    def begin_flush(self, first: int, count: int, schedule: Schedule) -> bool:
        """Return False: each operation is done by itself."""
        return False

    def begin_turn(self, order: Order) -> bool:
        """Return False: each operation is done by itself."""
        return False

    def land(self) -> None:
        """Do nothing: no tick is leapt."""

    def look(self) -> None:
        """Do nothing: the stages are asked at every operation."""

    def update(self, ops: Ops) -> Ops:
        """Return all operations: each stage is updated by itself."""
        return ops

    def spread(self) -> None:
        """Do nothing: each stage has its gradients."""

    def take_up(self) -> None:
        """Do nothing: stages and link hold the whole state."""

    def use(self, stacks: Sequence[Any]) -> None:
        """Do nothing: every stage runs on its own."""
