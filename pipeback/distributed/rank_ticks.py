"""Rank ticks: what one rank does in the order "skewed", for a loss that is computed outside of the pipeline.

The loss is computed on the rank of the last stage. The calls of all other ranks return at once.
"""

from __future__ import annotations

from functools import partial

from pipeback.distributed.rank_runner import RankRunner
from pipeback.runtime.thread_ticks import ThreadTicks


def rank_ticks(runner: RankRunner) -> ThreadTicks:
    """Return the ticks of this rank, by which other ranks see whether it works or waits."""
    health = runner.ranks.health

    def came(count: int) -> None:
        health.pushed += count

    return ThreadTicks(
        runner, came=came, handed=health.idle, waiting=partial(health.waiting, runner.judge, "the output")
    )
