"""Crossover: from how many stages on a pipeline that is never drained beats one that flushes.

Without a flush there is no bubble, so that updates come 1/(1 − bubble) times as fast. In return, delays need `slow`
times as many. Flowing wins where

    slow < 1/(1 − bubble)

at updates of one size. A flush of M micro-batches also makes updates M times as large, which need 1 + B/B_crit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeback.planner.loss import Loss
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.planner.techniques import Technique

STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Crossing(NamedTuple):
    """What so many stages buy and cost."""

    stages: int
    gain: float  # 1/(1 − bubble) of the flush, times what its larger updates cost
    slow: float  # of the flowing method


def crossings(
    flushing: Technique, flowing: Technique, micro_batches: int, loss: Loss, *, optimizer: str = "adamw",
    one: StageTimes | None = None, tokens: float = 0.0, stages: Sequence[int] = STAGES,
) -> list[Crossing]:  # fmt: skip
    """Gain and price over stages.

    micro_batches: per flush. one: the times of a stage; None: F takes 1, B 2. tokens: per micro-batch and replica; 0
    leaves the size of updates out.
    """
    times = one or StageTimes(1.0, 1.0, 1.0)
    batch = loss.batch(micro_batches * tokens) / loss.batch(tokens) if tokens else 1.0
    found = []
    for s in stages:
        bubble = simulate(flushing.routine(s, micro_batches), times).bubble
        found.append(Crossing(s, batch / (1 - bubble), loss.delay(flowing, s, optimizer).factor))
    return found


def first(some: Sequence[Crossing]) -> int | None:
    """The fewest stages, above one, from which flowing wins; None if it does nowhere."""
    wins = [one.stages for one in some if one.stages > 1 and one.slow < one.gain]
    return wins[0] if wins else None
