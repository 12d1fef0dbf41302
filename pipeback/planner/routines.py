"""Routines: what each worker of a pipeline does, and in which order, as numbers.

F is the forward of a micro-batch, I the gradient of its input, W the gradient of the weights, B both in one, and U the
update. All schedules of pipeback and of the papers below are *rounds*. In round r, worker w of p does

    F(r + ahead)     I(r) or B(r)     W(r − late)     U        ahead = lead + slack·(p − 1 − w),  late = slack·w

each as far as its micro-batch exists. So a few numbers say the whole order::

    routine      slack  lead      split  micro-batches in flight at w
    fill_drain   1      M                M                             Huang et al., arXiv 1811.06965
    one_f_one_b  1      0                p − w                         Narayanan et al., arXiv 2006.09503
    flowing      slack  0                slack·(p − 1 − w) + 1         Kosson et al., arXiv 2003.11666
    zb_h1        1      0         yes    p − w, w without their W      Qi et al., arXiv 2401.10241, section 2.3
    zb_h2        2      0         yes    2(p − 1 − w) + 1, and 2w      the same, section 2.4
    interleaved  2      (v − 1)p         (v + 1)p − 1 − 2w, of chunks  Narayanan et al., arXiv 2104.04473, 2.2

M micro-batches are a flush; forwards beyond it do not exist. Each worker holds one stage; interleaved, it holds v, its
chunks: stage k is on worker k mod p, and rounds count the operations of all chunks, in groups of p micro-batches. What
workers of several stages do in another order is in `placed_routines`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pipeback.planner.placed_routines import PLACED, PlacedRoutine
from pipeback.schedules.ops import Op, Schedule, until
from pipeback.schedules.split import rounds
from pipeback.schedules.worker_programs import interleaved_lead, interleaved_turn

NAMES = ("fill_drain", "one_f_one_b", "flowing", "zb_h1", "zb_h2", "interleaved", *PLACED)


class Routine(NamedTuple):
    """The order of one flush of micro-batches, or of so many of a pipeline that is never drained."""

    workers: int
    micro_batches: int
    slack: int  # forwards that a worker runs ahead of the next one
    lead: int = 0  # forwards that the last worker runs ahead
    split: bool = False  # whether I and W are operations of their own
    chunks: int = 1  # stages per worker
    every: int = 0  # micro-batches per update; 0: one update at the end

    @property
    def stages(self) -> int:
        return self.workers * self.chunks

    @property
    def rounds(self) -> int:
        """Forwards of a worker: one per micro-batch and chunk."""
        return self.micro_batches * self.chunks

    @property
    def update_count(self) -> int:
        """Updates of a worker."""
        return -(-self.micro_batches // self.every) if self.every else 1

    def ahead(self, worker: int) -> int:
        return self.lead + self.slack * (self.workers - 1 - worker)

    def late(self, worker: int) -> int:
        return self.slack * worker if self.split else 0

    def in_flight(self, worker: int) -> int:
        """The most micro-batches, of all chunks together, between their F and their I or B at a worker."""
        return min(self.rounds, self.ahead(worker) + 1)

    def unfinished(self, worker: int) -> int:
        """Micro-batches between their I and their W at a worker, when the most are in flight."""
        return min(max(0, self.rounds - 1 - self.ahead(worker)), self.late(worker))

    def forward(self, worker: int, n: int) -> tuple[int, int]:
        """Stage and micro-batch of the n-th forward of a worker."""
        if self.chunks == 1:
            return worker, n
        chunk, mb = interleaved_turn(n, self.workers, self.chunks)
        return chunk * self.workers + worker, mb

    def backward(self, worker: int, n: int) -> tuple[int, int]:
        """Stage and micro-batch of the n-th backward of a worker."""
        stage, mb = self.forward(worker, n)
        return self.stages - self.workers - stage + 2 * worker, mb

    def updates(self, n: int) -> bool:
        """Whether an update follows the n-th backward (or W) of a worker."""
        return n == self.rounds - 1 or (self.every > 0 and (n + 1) % self.every == 0)

    def program(self, worker: int) -> Iterator[tuple[int, Op]]:
        """Stage and operation, one after the other; the update of a worker with several stages names the first."""
        ahead, late = self.ahead(worker), self.late(worker)
        for kind, n in rounds(self.rounds, ahead, late=late, split=self.split, every=self.every):
            stage, mb = self.forward(worker, n) if kind == "F" else self.backward(worker, n)
            yield worker if kind == "U" else stage, Op(kind, mb)


def routine(
    name: str, workers: int, micro_batches: int, *, chunks: int = 2, slack: int = 2, every: int = 1
) -> Routine | PlacedRoutine:
    """The routine of this name. chunks: of interleaved and looped_bfs; zb_v has two. slack, every: of flowing.

    Raises ValueError for a name or a number that there cannot be.
    """
    for what, value in (("workers", workers), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what} must be at least 1, but is {value}; give for example {what}=4")
    if name == "fill_drain":
        return Routine(workers, micro_batches, slack=1, lead=micro_batches)
    if name == "one_f_one_b" or (name == "interleaved" and chunks == 1):
        return Routine(workers, micro_batches, slack=1)
    if name == "flowing":
        return Routine(workers, micro_batches, slack=slack, every=every)
    if name in ("zb_h1", "zb_h2") or (name == "zb_v" and workers == chunks == 1):
        return Routine(workers, micro_batches, slack=2 if name == "zb_h2" else 1, split=True)
    if name == "interleaved":
        if micro_batches % workers:
            raise ValueError(
                f"interleaved: {micro_batches} micro-batches are no multiple of {workers} workers, which its groups "
                f"need; give micro_batches={-(-micro_batches // workers) * workers}"
            )
        slack, groups = interleaved_lead(chunks)
        return Routine(workers, micro_batches, slack, lead=groups * workers, chunks=chunks)
    if name in PLACED:
        return PlacedRoutine(name, workers, micro_batches, 2 if name == "zb_v" else chunks)
    raise ValueError(f"there is no routine {name!r}; there are {', '.join(NAMES)}")


def read(schedule: Schedule, stages: int, micro_batches: int) -> Routine:
    """The routine of any `Schedule`, one stage per worker, read off its programs and compared with them.

    Raises ValueError if the programs are not rounds.
    """
    programs = [list(until(schedule(s, stages), micro_batches)) for s in range(stages)]
    # a round begins with its F, so the F in front of the first B, or I, belongs to it
    ahead = [next((n for n, op in enumerate(program) if op.kind in "BI"), 1) - 1 for program in programs]
    gaps = [(a - b, a < micro_batches - 1) for a, b in pairwise(ahead)]
    seen = [gap for gap, whole in gaps if whole] or [max((gap for gap, _ in gaps), default=1) or 1]
    updated = [op.mb + 1 for op in programs[0] if op.kind == "U"]
    split = any(op.kind == "I" for op in programs[0])
    every = updated[0] if len(updated) > 1 else 0
    found = Routine(stages, micro_batches, seen[-1], ahead[-1], split=split, every=every)
    for s, program in enumerate(programs):
        if [op for _, op in found.program(s)] != program:
            raise ValueError(
                f"stage {s}: the schedule does not consist of rounds of one forward and one backward; "
                "use pipeback.timeline.timeline, which steps through any schedule"
            )
    return found
