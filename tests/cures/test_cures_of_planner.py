"""What the planner refuses, and the cures in its messages, typed."""

from __future__ import annotations

import pytest

from pipeback.planner.routines import read, routine
from pipeback.planner.simulation import simulate
from pipeback.planner.sweeps import StageTimes
from pipeback.schedules.ops import Op
from pipeback.schedules.timeline import timeline

from .rows import Row, refused


def odd(stage, stages):
    yield from (Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1), Op("F", 2), Op("B", 2), Op("U", 2))


ROWS = {
    "no workers": Row(
        lambda: routine("flowing", 0, 8),
        "workers must be at least 1, but is 0; give for example workers=4",
        lambda: routine("flowing", 4, 8),
    ),
    "groups": Row(
        lambda: routine("interleaved", 4, 6),
        "6 micro-batches are no multiple of 4 workers, which its groups need; give micro_batches=8",
        lambda: routine("interleaved", 4, 8),
    ),
    "times": Row(
        lambda: simulate(routine("flowing", 3, 4), [StageTimes()] * 2),
        "times needs one entry per stage: 3, not 2; give those of each stage",
        lambda: simulate(routine("flowing", 3, 4), [StageTimes()] * 3),
    ),
    "no rounds": Row(
        lambda: read(odd, 2, 3),
        "does not consist of rounds of one forward and one backward; use pipeback.timeline.timeline",
        lambda: list(timeline(odd, 2, 3)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_message_says_what_helps(name):
    row = ROWS[name]
    refused(row.broken, row.says)
    row.cured()
