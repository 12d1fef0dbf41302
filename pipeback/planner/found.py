"""Found: the options of a search, ranked, as a table in text, HTML and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from pipeback.notebook import table as html_table
from pipeback.planner.estimates import Estimate, Job
from pipeback.planner.memory import NAMES
from pipeback.planner.quantities import days, gigabytes, large

DAGGER = "†"


class Found(Sequence[Estimate]):
    """Options, best first. refused: of each method of which none fits, the option that needs the least memory."""

    def __init__(self, job: Job, ranked: Sequence[Estimate], refused: Sequence[Estimate]) -> None:
        self.job, self.ranked, self.refused = job, list(ranked), list(refused)

    def __len__(self) -> int:
        return len(self.ranked)

    @overload
    def __getitem__(self, n: int) -> Estimate: ...
    @overload
    def __getitem__(self, n: slice) -> list[Estimate]: ...
    def __getitem__(self, n: int | slice) -> Estimate | list[Estimate]:
        return self.ranked[n]

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.ranked)

    @property
    def best(self) -> Estimate:
        return self.ranked[0]
