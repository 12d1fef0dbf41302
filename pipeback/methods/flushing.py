"""Flushing: what methods that flush have in common: micro-batches per flush, and a schedule of that many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeback.methods.base import Method
from pipeback.schedules.ops import Schedule
from pipeback.schedules.programs import positive


@dataclass(repr=False)
class Flushing(Method):
    """The base of methods that flush.

    micro_batches: M, micro-batches per flush, counted across pushes; None: each push is one flush.
    """

    micro_batches: int | None = None

    by_number: ClassVar[staticmethod[[int], Schedule]]  # M -> the schedule

    def __post_init__(self) -> None:
        positive("chunks", self.chunks)
        self.schedule = self.by_number(1 if self.micro_batches is None else self.micro_batches)
        self.flush_each_push = self.micro_batches is None

    def schedule_at(self, start: int, pushed: int) -> Schedule:
        return self.by_number(pushed) if self.micro_batches is None else self.schedule
