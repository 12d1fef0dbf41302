"""Timeline: when operations run under given costs; delays and horizons, counted on the programs themselves.

An operation is the forward (F) or backward (B) of a micro-batch at a stage, or the update (U) of the stage's weights.
B may be split into I, the gradient of the input, and W, that of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pipeback.schedules.ops import Op, Schedule, endless, until
from pipeback.schedules.placement import Placed
from pipeback.schedules.programs import Flowing, flushed_in_flight
from pipeback.schedules.split import Late, zero_bubble_in_flight

if TYPE_CHECKING:
    from fractions import Fraction  # alone, since its decimals take long to import

Time: TypeAlias = "int | float | Fraction"


class Slot(NamedTuple):
    """One operation on the clock: it occupies its stage's worker from `start` to `end`."""

    start: Time
    end: Time
    stage: int
    op: Op


class Horizon(NamedTuple):
    """How many updates of its stage lie ahead when an operation starts (SpecTrain's h)."""

    forward: int
    backward: int


UNIT: Mapping[str, Time] = {"F": 1, "B": 1, "I": 1, "W": 1, "U": 0}


def timeline(
    schedule: Schedule,
    stages: int,
    micro_batches: int,
    costs: Mapping[str, Time] | Sequence[Mapping[str, Time]] = UNIT,
    workers: Sequence[int] | None = None,
    message: Time = 0,
) -> Iterator[Slot]:
    """Run `micro_batches` through the schedule, each operation as early as programs, data and workers allow.

    costs: the times of F, B (or I and W) and U, one mapping for all stages or one per stage.
    workers: the worker of each stage; None: one worker per stage. A worker runs one operation at a time: of those that
    are ready, the one that can start first; then a backward before a forward; then that of the oldest micro-batch.
    A `Placed` schedule has workers and an order of its own.
    message: the time from the end of F, B or I until the next stage has what it gives, if another worker does it; the
    sender goes on meanwhile.
    Yields slots in order of their start.
    """
    if isinstance(schedule, Placed):
        each = range(schedule.placement.workers)
        mine = [schedule.until(worker, micro_batches) for worker in each]
        return play(mine, list(each), stages, costs, message=message, owner=schedule.placement.owner)
    owner = list(range(stages)) if workers is None else list(workers)
    if len(owner) != stages:
        raise ValueError(f"workers needs one entry per stage: {stages}, not {len(owner)}; give the worker of each")
    programs = [zip(repeat(s), until(schedule(s, stages), micro_batches)) for s in range(stages)]
    return play(programs, owner, stages, costs, message=message, owner=owner)


Place = tuple[str, int, int]  # (kind, stage, micro-batch)


def play(
    programs: Sequence[Iterable[tuple[int, Op]]],
    workers: Sequence[int],
    stages: int,
    costs: Mapping[str, Time] | Sequence[Mapping[str, Time]] = UNIT,
    done: Iterable[Place] = (),
    *,
    message: Time = 0,
    owner: Sequence[int] | None = None,
) -> Iterator[Slot]:
    """Do each program in its own order, each operation as early as data and workers allow.

    programs: of (stage, operation), one per stage as schedules have it, or one per worker.
    workers: the worker that does each program.
    done: operations that had ended before the first one, so that their outputs are there.
    message: see `timeline`. owner: the worker of each stage; None: each stage has one of its own.
    Yields slots in order of their start. Raises RuntimeError if all wait for each other.
    """
    per_stage = [costs] * stages if isinstance(costs, Mapping) else list(costs)
    if len(per_stage) != stages:
        raise ValueError(
            f"costs needs one entry per stage: {stages}, not {len(per_stage)}; give the units of time of each"
        )
    rest = [iter(program) for program in programs]
    heads = [next(program, None) for program in rest]
    ended: dict[Place, Time] = dict.fromkeys(done, 0)
    free: dict[int, Time] = dict.fromkeys(workers, 0)
    ready: list[tuple[Time, int, int, int]] = []  # a heap of heads whose input is there, and the earliest start of each
    blocked: dict[Place, list[int]] = {}  # the programs that wait for the output of an operation

    def come(n: int) -> None:
        """The head of a program is another one, or its input has come."""
        head = heads[n]
        if head is None:
            return
        s, op = head
        before = needs(op, s, stages)
        if before is not None and before not in ended:
            blocked.setdefault(before, []).append(n)
            return
        begin = 0 if before is None else ended[before]
        if message and before is not None and (owner is None or owner[before[1]] != owner[s]):
            begin += message
        # the oldest micro-batch first, so that what a neighbour waits for leaves early
        heappush(ready, (max(begin, free[workers[n]]), _FIRST.index(op.kind), op.mb, n))

    for n in range(len(heads)):
        come(n)
    while ready:
        start, kind, mb, n = heappop(ready)
        if free[workers[n]] > start:  # its worker has done another one meanwhile
            heappush(ready, (free[workers[n]], kind, mb, n))
            continue
        head = heads[n]
        assert head is not None
        s, op = head
        end = start + per_stage[s][op.kind]
        place = op.kind, s, op.mb
        ended[place] = free[workers[n]] = end
        heads[n] = next(rest[n], None)
        come(n)
        for other in blocked.pop(place, ()):
            come(other)
        yield Slot(start, end, s, op)
    if any(head is not None for head in heads):
        waiting = ", ".join(f"stage {head[0]} for {head[1]}" for head in heads if head is not None)
        raise RuntimeError(f"the schedule deadlocks, waiting: {waiting}")


_FIRST = "UBIFW"  # of operations that could start together: a neighbour waits for B and I, and nobody for W


def needs(op: Op, s: int, stages: int) -> Place | None:
    """The operation of another stage whose output `op` at stage s takes; None if there is none."""
    if op.kind == "F" and s > 0:
        return "F", s - 1, op.mb
    if op.kind in ("B", "I") and s < stages - 1:
        return op.kind, s + 1, op.mb
    return None


def bubble(slots: Iterable[Slot], workers: Sequence[int] | None = None) -> float:
    """The bubble: the idle share of the workers' time between the first operation of all and the last.

    1 − Σ (end − start) / (workers · (last end − first start)), as a worker does one operation at a time; 0 if nothing
    was done. workers: the worker of each stage; None: one per stage that has slots.
    """
    slots = list(slots)
    if not slots:
        return 0.0
    count = len(set(workers) if workers else {slot.stage for slot in slots})
    span = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    busy = sum(slot.end - slot.start for slot in slots)
    return float(1 - busy / (span * count)) if span else 0.0


def delays(schedule: Schedule, stages: int) -> list[int]:
    """The delay of each stage: its updates between F(i) and B(i), or W(i) if B is split, in the steady state; within a
    group, the largest.
    """
    return [counted.delay for counted in _all_steady(schedule, stages)]


def in_flight(schedule: Schedule, stages: int) -> list[int]:
    """For each stage, the most micro-batches between their forward and their backward (to its end, if it is split) in
    the steady state.
    """
    return [counted.in_flight for counted in _all_steady(schedule, stages)]


def horizons(schedule: Schedule, stages: int, costs: Mapping[str, Time] = UNIT) -> list[Horizon]:
    """For each stage, its updates that end after an operation on i starts and before B(i) starts on stage 0.

    They are counted in the steady state, i being a micro-batch. With `flowing(1)` and unit costs, they are SpecTrain's
    ⌊k/2⌋ + N − k − 1 (forward) and ⌊k/2⌋ (backward). These are not counted, which would take time in proportion to S².
    """
    if costs is UNIT and schedule == Flowing(slack=1, every=1):
        return [Horizon(s // 2 + stages - s - 1, s // 2) for s in range(stages)]
    full = max(in_flight(schedule, stages))  # until so many have come, the pipeline fills
    i = 2 * full + 6 * stages + 12  # well inside the steady state
    until_mb = i + full + 2 * stages + 12
    start: dict[tuple[str, int], Time] = {}
    updates: list[list[Time]] = [[] for _ in range(stages)]
    for slot in timeline(schedule, stages, until_mb, costs):
        if slot.op.kind == "U":
            updates[slot.stage].append(slot.end)
        elif slot.op.mb == i:
            start[slot.op.kind, slot.stage] = slot.start
    back = "I" if ("I", 0) in start else "B"
    target = start[back, 0]

    def ahead(kind: str, s: int) -> int:
        return sum(start[kind, s] < end < target for end in updates[s])

    return [Horizon(ahead("F", s), ahead(back, s)) for s in range(stages)]


class _Steady(NamedTuple):
    delay: int
    in_flight: int


@lru_cache(maxsize=64)
def _all_steady(schedule: Schedule, stages: int) -> tuple[_Steady, ...]:
    """Return the steady state of every stage; it is cached, since methods ask for it once per stage.

    Counting on programs takes time in proportion to S², so it is computed where the schedule is known.
    """
    if isinstance(schedule, Flowing):
        ahead = [schedule.slack * (stages - 1 - s) for s in range(stages)]
        return tuple(_Steady(-(-n // schedule.every), n + 1) for n in ahead)
    if isinstance(schedule, Late):
        ahead = [schedule.slack * (stages - 1 - s) + schedule.late for s in range(stages)]
        return tuple(_Steady(n, n + 1) for n in ahead)
    known = flushed_in_flight, zero_bubble_in_flight
    flushed = [next((n for count in known if (n := count(schedule, s, stages))), None) for s in range(stages)]
    if None not in flushed:
        return tuple(_Steady(0, n) for n in flushed if n is not None)
    return tuple(_steady(schedule, s, stages) for s in range(stages))


def _steady(schedule: Schedule, stage: int, stages: int) -> _Steady:
    """Count on the program: the largest values over a window that is as long as everything before it."""
    window = updates = 0
    found: list[_Steady] = []
    # double the window until the count no longer changes and groups have passed, so that the pipeline has filled
    while len(found) < 3 or found[-1] != found[-2] or found[-2] != found[-3] or updates < 8:
        window = 2 * window or 8 * (stages + 1)
        updates = delay = running = most = 0
        seen: dict[int, int] = {}
        for n, (kind, i) in enumerate(islice(endless(schedule, stage, stages), window)):
            if kind == "F":
                seen[i] = updates
                running += 1
                most = max(most, running) if n >= window // 2 else most
            elif kind in ("B", "W"):
                delay = max(delay, updates - seen.pop(i)) if n >= window // 2 else delay
                running -= 1
            elif kind == "U":
                updates += 1
        found.append(_Steady(delay, most))
        if len(found) > 16:
            raise RuntimeError(f"stage {stage}: the delay of this schedule does not settle; is the program endless?")
    return found[-1]
