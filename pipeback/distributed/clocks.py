"""Clocks: bring the clocks of several processes onto the clock of the first rank.

Every other rank asks the first one for its time several times and keeps the answer that came back soonest: the first
rank read its clock somewhere between question and answer (Cristian's method). In times of the asking rank's clock:

    question t₀ ──────► read T ──────► answer t₁        the first rank's clock is T − (t₀ + t₁)/2 ahead, ± (t₁ − t₀)/2

Two such readings, one before and one after a measurement, also give the ratio of the clocks' speeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.runtime.loop import Loop
from pipeback.schedules.ops import Op
from pipeback.schedules.recording import Move, Track
from pipeback.schedules.timeline import Slot

ROUNDS = 20  # questions per rank; the first ones must wake sockets and threads


class Reading(NamedTuple):
    """The clock `time.perf_counter` of this process compared with that of the first rank, in seconds."""

    here: float  # the time of the reading on this process's clock
    ahead: float = 0.0  # by how much the first rank's clock is ahead
    uncertainty: float = 0.0  # the error of `ahead` is at most this, in either direction


def read(ranks: Ranks | SingleProcess) -> Reading:
    """Compare the clocks of all ranks; every rank calls it. Raises RankError for a rank that does not call it."""
    here = time.perf_counter()
    if not isinstance(ranks, Ranks):
        return Reading(here)
    ranks.meet("record()")
    first, what = ranks.everyone[0], "the comparison of clocks"
    with ranks.health.calling("record()"), ranks.health.waiting(ranks.others, what):
        try:
            if ranks.rank == first:
                for rank in ranks.everyone[1:]:
                    _answer(rank, ranks.control)
                return Reading(here)
            return min((_ask(first, ranks.control) for _ in range(ROUNDS)), key=lambda reading: reading.uncertainty)
        except RuntimeError as error:
            raise ranks.lost(ranks.others, what) from error


def _ask(first: int, group: dist.ProcessGroup) -> Reading:
    answer = torch.zeros(1, dtype=torch.float64, device="cpu")
    asked = time.perf_counter()
    dist.send(answer, first, group)
    dist.recv(answer, first, group)
    back = time.perf_counter()
    return Reading(back, answer.item() - (asked + back) / 2, (back - asked) / 2)


def _answer(rank: int, group: dist.ProcessGroup) -> None:
    question = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(ROUNDS):
        dist.recv(question, rank, group)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), rank, group)


class Between(NamedTuple):
    """Converts times between two readings to the first rank's clock; the clocks drift apart evenly."""

    before: Reading
    after: Reading

    def __call__(self, moment: float) -> float:
        """Convert a time of this process's clock to the first rank's clock."""
        (then, ahead, _), (now, later, _) = self
        share = (moment - then) / (now - then) if now > then else 0.0
        return moment + ahead + (later - ahead) * share

    @property
    def uncertainty(self) -> float:
        return max(self.before.uncertainty, self.after.uncertainty)


def tracks(ranks: Ranks | SingleProcess, loops: Sequence[Loop], owner: Sequence[int], before: Reading) -> list[Track]:
    """Return the operations that all workers have run since `before`, on the first rank's clock; every rank calls it.

    loops: those of this process. owner: the worker of each stage.
    """
    clock, here = Between(before, read(ranks)), ""
    if isinstance(ranks, Ranks):
        facts = ranks.facts[ranks.rank]
        here = f"rank {ranks.rank} ({facts.host}, process {facts.process})"
    mine = []
    for loop in loops:
        worker = owner[min(loop.worker.stages)]
        slots = [Slot(clock(a), clock(b), s, Op(kind, mb)) for a, b, s, kind, mb in loop.worker.trace]  # type: ignore[arg-type]
        moves = [Move(clock(a), clock(b), kind, s) for a, b, kind, s in loop.worker.residence.moves]  # type: ignore[arg-type]
        mine.append(Track(here or f"worker {worker}", worker, loop.replica, slots, clock.uncertainty, moves))
    return [track for some in ranks.gather(mine, "recorded") for track in some]
