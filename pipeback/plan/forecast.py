"""Forecast: what pushes will move, hold and wait for, counted by a dry run of the real loop and order."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, gcd
from operator import add
from typing import NamedTuple

from pipeback.plan import drive
from pipeback.plan.dry_run import DryWorker, Room
from pipeback.plan.survey import PlanInputs, StageBytes, loops, period
from pipeback.runtime.loop import Loop
from pipeback.schedules.timeline import in_flight
from pipeback.streaming.disk_store import due

# what a `HostBytes` is made of
HOST = ("weights", "optimizer state", "method state", "older weights", "gradients", "activations")


class Forecast(NamedTuple):
    """The result of a dry run; bytes and seconds are averages per push."""

    weights_in: float
    fetches: float
    gradients_out: float
    sums_in: float
    written: float  # bytes written to files
    seconds: float
    stall: float
    device: Room  # what is on the device when it is fullest; buffers count as weights
    peak_weights: int  # the most bytes of weights alone
    peak_stages: int
    peak_flights: dict[int, int]  # micro-batches between F and B, of each stage
    host_gradients: int

    @property
    def share(self) -> float:
        """The share of the time that is waiting."""
        return self.stall / self.seconds if self.seconds else 0.0


class HostBytes(NamedTuple):
    """Bytes in host memory, by kind."""

    weights: int = 0
    optimizer: int = 0
    method: int = 0
    older: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def foresee(facts: PlanInputs, micro_batches: int, pushes: int | None = None, prefetch: int | None = None) -> Forecast:
    """Dry-run so many pushes, after others that fill the pipeline. prefetch: that of the store, if None."""
    ahead = facts.prefetch if prefetch is None else prefetch
    cycle, fill = period(facts.method), fills(facts, micro_batches)
    quiet = pushes is not None
    pushes = pushes or min(64, max(2, cycle // gcd(cycle, micro_batches)))
    counts, dries = [], []
    commits = 0
    for loop, dry in loops(facts, ahead):
        arrived = 0
        outside = drive.Outside(loop, ticks=bool(facts.stacks)) if facts.outside else None

        def one(loop: Loop = loop, dry: DryWorker = dry, outside: drive.Outside | None = outside) -> None:
            nonlocal arrived, commits
            outside.step(micro_batches) if outside is not None else drive.push(loop, micro_batches)
            arrived += micro_batches
            flushed = loop.fresh or loop.order.empty
            if facts.kind == "disk" and due(facts.method, facts.commit_every, arrived, flushed):
                dry.rest()
                arrived, commits = 0, commits + 1

        for _ in range(fill):
            one()
        if quiet:
            loop.rest()  # what a push of stages that run as one has left undone is done, too
        before, commits = dry.number.copy(), 0
        for _ in range(pushes):
            one()
        if quiet:
            loop.rest()  # what a push of stages that run as one has left undone is done, too
        counts.append(dry.number.since(before))
        dries.append(dry)
    many = facts.replicas
    rooms = [dry.most for dry in dries]
    buffers = sum(p.buffers for p in facts.stages.values())
    files = commits * sum(p.small for p in facts.stages.values()) + sum(
        count.updates[s] * p.newly + count.spills[s] * (p.load.gradients if p.load.left is None else p.load.left)
        for count in counts
        for s, p in facts.stages.items()
    )

    def mean(name: str) -> float:
        moved: float = sum(getattr(count, name) for count in counts)
        return many * moved / pushes

    slowest = max(counts, key=lambda count: count.seconds)
    return Forecast(
        mean("weights_in"), mean("fetches"), mean("gradients_out"), mean("sums_in"),
        many * files / pushes if facts.kind == "disk" else 0.0,
        slowest.seconds / pushes, slowest.stall / pushes,
        Room(
            many * (sum(room.weights for room in rooms) + buffers),
            many * sum(room.gradients for room in rooms),
            many * sum(room.activations for room in rooms),
        ),
        many * sum(dry.peak_weights for dry in dries),
        max(dry.peak_stages for dry in dries),
        {s: place.peak_flights for dry in dries for s, place in dry.stages.items()},
        many * sum(dry.host_gradients for dry in dries),
    )  # fmt: skip


def fills(facts: PlanInputs, micro_batches: int) -> int:
    """The number of pushes after which each is like the one before."""
    if facts.method.flush_each_push:
        return 1
    return ceil((max(in_flight(facts.method.schedule, facts.depth)) + period(facts.method)) / micro_batches)


def host_room(facts: PlanInputs, push: Forecast) -> HostBytes:
    """Bytes in host memory: a whole host store, or the stages of a disk store that an update or a shift has opened."""
    waiting = facts.replicas * sum(p.waiting * push.peak_flights[s] for s, p in facts.stages.items())
    if facts.kind == "device":
        return HostBytes(activations=waiting)
    if facts.kind == "host":
        whole = HostBytes(*(facts.replicas * part for part in _kept(facts.stages.values())))
        return whole._replace(gradients=push.host_gradients, activations=waiting)
    in_stacks = {s for stack in facts.stacks for s in stack}
    updated = [*facts.stacks, *([s] for s in facts.stages if s not in in_stacks)]  # each of these by one update
    together = [[facts.stages[s] for s in some if s in facts.stages] for some in updated]
    largest = max(map(_kept, together), key=sum)
    if facts.method.copies != "live":  # beside an update, a fetch opens a stage whose weights it shifts
        shifted = max((_kept([one]) for one in facts.stages.values()), key=sum)
        largest = HostBytes(*map(add, largest, shifted))
    most = (facts.prefetch or 0) + 1
    queued = sorted((sum(p.load.gradients for p in some) for some in together), reverse=True)[:most]
    gradients = min(push.host_gradients, sum(queued) * facts.replicas)
    opened = (facts.replicas * len(facts.workers) * part for part in largest)
    return HostBytes(*opened)._replace(gradients=gradients, activations=waiting)


def _kept(stages: Iterable[StageBytes]) -> HostBytes:
    """What a store keeps of these stages."""
    kept = ((p.home, p.optimizer, p.method, p.older) for p in stages)
    return HostBytes(*(sum(column) for column in zip(*kept, strict=True)))


def disk_room(facts: PlanInputs, push: Forecast) -> int:
    """Bytes of the version that was committed last and of the one that is written beside it."""
    if facts.kind != "disk":
        return 0
    flying = 0
    if any(facts.delays):
        flying = sum(p.flight * push.peak_flights[s] for s, p in facts.stages.items())
    return facts.replicas * (2 * sum(p.pages for p in facts.stages.values()) + 2 * flying)
