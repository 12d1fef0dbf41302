"""Techniques: the methods as the planner knows them: routine, delay, copies and state, by name and without torch.

They are entries of the catalogue, so that methods of other packages can be added; a test compares ours with
`pipeback.methods`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeback.planner import catalogue
from pipeback.planner.placed_routines import PlacedRoutine, held, holder
from pipeback.planner.routines import Routine, routine


class DelayPrice(NamedTuple):
    """What a source says of the price of delays: kappa per update of effective delay."""

    kappa: float
    source: str
    optimizer: str = ""
    delay: float = float("inf")  # up to so many updates
    samples: float = float("inf")  # and so many samples per update


@dataclass(frozen=True)
class Technique:
    """A method. M is the number of micro-batches of a flush or a group."""

    name: str
    title: str
    order: str  # the name of its routine
    slack: int = 0
    group: bool = False  # whether a flowing method updates once per M micro-batches
    # of the weights, the newest included; "stash": one per update of delay, and one; "stash+1": one more where there
    # is delay
    copies: int | str = 1
    state: float = 0.0  # in copies of the weights
    needs: tuple[str, ...] = ()  # optimizers; empty: any
    slow: tuple[DelayPrice, ...] = ()

    @property
    def flows(self) -> bool:
        """Whether the pipeline is never drained."""
        return self.order == "flowing"

    @property
    def updates_each(self) -> bool:
        """Whether every micro-batch is an update of its own."""
        return self.flows and not self.group

    def routine(self, workers: int, micro_batches: int, chunks: int = 1) -> Routine | PlacedRoutine:
        """What workers do for M micro-batches."""
        every = micro_batches if self.group else 1
        return routine(self.order, workers, micro_batches, chunks=chunks, slack=self.slack, every=every)

    def mine(self, worker: int, workers: int, chunks: int = 1) -> list[int]:
        """The stages of a worker."""
        return held(self.order, workers, chunks, worker)

    def worker(self, stage: int, workers: int) -> int:
        """The worker of a stage."""
        return holder(self.order, workers, stage)

    def apart(self, stage: int, workers: int) -> bool:
        """Whether a stage is on another worker than the stage after it."""
        return self.worker(stage, workers) != self.worker(stage + 1, workers)

    def delays(self, stages: int) -> list[int]:
        """D of every stage: its updates between F and B of a micro-batch."""
        if not self.flows:
            return [0] * stages
        return [1] * stages if self.group else [self.slack * after for after in range(stages - 1, -1, -1)]

    def held(self, stage: int, stages: int) -> float:
        """Copies of the weights that a stage holds, the newest included."""
        if self.copies in ("stash", "stash+1"):
            delay = self.slack * (stages - 1 - stage)
            return 1.0 + delay + (self.copies == "stash+1" and delay > 0)
        return float(self.copies)


def technique(name: str) -> Technique:
    """The method of this name in the catalogue. Raises ValueError for an unknown one, and suggests the nearest."""
    entries = catalogue.table("methods")
    key = catalogue.key("method", name, entries)
    entry: dict[str, Any] = dict(entries[key])
    if "routine" not in entry:
        raise ValueError(f"[methods.{key}] has no routine; give one of those that methods.toml names")
    return Technique(
        key, entry.get("title", key), entry["routine"], entry.get("slack", 0), entry.get("group", False),
        entry.get("copies", 1), float(entry.get("state", 0)), tuple(entry.get("needs", ())),
        tuple(DelayPrice(**known) for known in entry.get("slow", ())),
    )  # fmt: skip


def without_pipeline() -> Technique:
    """What trains where there is no pipeline, whatever the methods: one micro-batch after the other, then an update."""
    return replace(technique("sgd"), order="one_f_one_b")


def assumed() -> DelayPrice:
    """What is assumed of the price of delays where nothing is known."""
    return DelayPrice(**catalogue.defaults("methods")["slow"])


def names() -> list[str]:
    return list(catalogue.table("methods"))
