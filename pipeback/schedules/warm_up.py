"""Warm-up: a schedule of flushes for some micro-batches, and another one from there on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeback.schedules.flushes import Flushes, in_flushes
from pipeback.schedules.ops import Op, Schedule, until
from pipeback.schedules.programs import Flowing, fill_drain


@dataclass(frozen=True)
class WarmUp:
    """Flushes of as many micro-batches as `then` has per update, until `begins` micro-batches are done and the pipeline
    is empty; after that, `then`.
    """

    begins: int
    then: Flowing

    @property
    def every(self) -> int:
        """The micro-batches of an update."""
        return self.then.every

    def updated(self, backwards: int) -> int:
        """As `Flowing.updated`, after the warm-up."""
        return self.begins + self.then.updated(backwards - self.begins)

    def __call__(self, stage: int, stages: int) -> Iterator[Op]:
        yield from until(fill_drain(self.then.every)(stage, stages), self.begins)
        yield from self.rounds(stage, stages, self.begins, ahead=False)

    def rounds(self, stage: int, stages: int, first: int, *, ahead: bool = True) -> Iterator[Op]:
        """The rest of the program, from the round in which micro-batch `first` goes backward, after the warm-up.

        ahead: whether the forwards that run ahead are done.
        """
        program = self.then.rounds(stage, stages, first - self.begins) if ahead else self.then(stage, stages)
        for kind, i in program:
            yield Op(kind, i + self.begins)

    @property
    def turns(self) -> int:
        """As `Flowing.turns`, after the warm-up; where even and odd stages would take turns, 0."""
        return self.then.turns if self.then.turns == 1 else 0


def rounded(schedule: Schedule, *, several: bool = False) -> Flowing | WarmUp | None:
    """Return a schedule that consists of rounds with an update each, perhaps after a warm-up; None for others.

    several: whether rounds may be without an update, since it is made once in several micro-batches.
    """
    flowing = schedule.then if isinstance(schedule, WarmUp) else schedule
    fits = isinstance(flowing, Flowing) and (several or flowing.every == 1)
    return schedule if fits else None  # type: ignore[return-value]


def in_rounds(schedule: Schedule, *, by_group: bool) -> Flowing | WarmUp | Flushes | None:
    """Return a schedule as what can be done at once of it: flushes, groups, if `by_group`, or rounds."""
    found = in_flushes(schedule)
    return found if found is not None and (by_group or not found.slack) else rounded(schedule, several=True)
