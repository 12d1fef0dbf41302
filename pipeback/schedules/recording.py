"""Recording: what the workers of a run did and when, and how long the schedule alone would make the same work take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from heapq import merge
from itertools import chain, pairwise
from typing import Literal, NamedTuple, overload

from pipeback.schedules.ops import Op
from pipeback.schedules.timeline import UNIT, Place, Slot, Time, needs, play


class Move(NamedTuple):
    """A transfer of streaming, in a thread of its own beside the operations; times in seconds."""

    start: float
    end: float
    kind: Literal["fetch", "store"]  # "fetch": weights came to the device; "store": they were updated in the store
    stage: int


class Track(NamedTuple):
    """The operations and transfers of one worker: a rank, a thread, or the event loop of a single process."""

    name: str
    worker: int
    replica: int
    slots: list[Slot]  # in the order in which the worker did them; times in seconds
    uncertainty: float = 0.0  # seconds by which its clock may be off that of the first rank
    moves: Sequence[Move] = ()  # of a worker whose weights are streamed


class Idle(NamedTuple):
    """The shares of the workers' time in which they were idle, from 0 to 1."""

    share: float  # the bubble: the idle share of all workers' time from the first operation of all to the last
    each: list[float]  # the same for each worker
    steady: float  # the same without fill and drain: from the last worker's first to the first worker's last operation
    span: float  # seconds from the first operation's start to the last one's end


class Recording(Sequence[Slot]):
    """The operations of all workers, in order of their start, in seconds from the first.

    tracks: one per worker, by replica and worker. owner: the worker of each stage. name: what was run.
    """

    def __init__(self, tracks: Sequence[Track], owner: Sequence[int], name: str = "") -> None:
        zero = min((slot.start for track in tracks for slot in track.slots), default=0)
        self.tracks = [
            track._replace(
                slots=[Slot(s.start - zero, s.end - zero, s.stage, s.op) for s in track.slots],
                moves=[Move(m.start - zero, m.end - zero, m.kind, m.stage) for m in track.moves],
            )
            for track in sorted(tracks, key=lambda track: (track.replica, track.worker))
        ]
        self.owner, self.name = list(owner), name

    @cached_property
    def slots(self) -> list[Slot]:
        return list(merge(*(track.slots for track in self.tracks), key=lambda slot: slot.start))

    def __len__(self) -> int:
        return sum(len(track.slots) for track in self.tracks)

    @overload
    def __getitem__(self, n: int) -> Slot: ...
    @overload
    def __getitem__(self, n: slice) -> list[Slot]: ...
    def __getitem__(self, n: int | slice) -> Slot | list[Slot]:
        return self.slots[n]

    @property
    def stages(self) -> int:
        return len(self.owner)

    @property
    def uncertainty(self) -> float:
        """Seconds by which the times of two workers may be off each other: those of the two least certain clocks."""
        return sum(sorted(track.uncertainty for track in self.tracks)[-2:])

    def micro_batches(self) -> int:
        return len({slot.op.mb for slot in self if slot.op.kind == "F"})

    def gaps(self) -> list[list[tuple[float, float]]]:
        """When each worker did nothing, between the first and the last operation of all."""
        end = max((slot.end for slot in self), default=0)
        found = []
        for track in self.tracks:
            mine = [(0, 0), *((slot.start, slot.end) for slot in track.slots), (end, end)]
            found.append([(float(a[1]), float(b[0])) for a, b in pairwise(mine) if a[1] < b[0]])
        return found

    def idle(self) -> Idle:
        """The idle shares. Sending counts as work, since it is part of the operation whose result is sent."""
        gaps, end = self.gaps(), float(max((slot.end for slot in self), default=0))
        begun = max((float(track.slots[0].start) if track.slots else end for track in self.tracks), default=0.0)
        over = min((float(track.slots[-1].end) if track.slots else 0.0 for track in self.tracks), default=0.0)
        each = [sum(b - a for a, b in mine) / end if end else 0.0 for mine in gaps]
        between = sum(max(0.0, min(b, over) - max(a, begun)) for a, b in chain.from_iterable(gaps))
        steady = between / ((over - begun) * len(gaps)) if over > begun else 0.0
        return Idle(sum(each) / len(each) if each else 0.0, each, steady, end)

    def window(self, first: int, last: int) -> Recording:
        """Return the part from the first stage's F of the `first` micro-batch to that of the `last`, counted from 0.

        Operations across its ends are cut there. Raises ValueError where the run has no such micro-batches.
        """
        starts = sorted(slot.start for slot in self.tracks[0].slots if slot.stage == 0 and slot.op.kind == "F")
        if not 0 <= first < last < len(starts):
            raise ValueError(
                f"a window from micro-batch {first} to {last} does not lie in a run of {len(starts)}; "
                f"write for example window({len(starts) // 4}, {len(starts) // 2})"
            )
        begin, end = starts[first], starts[last]
        tracks = [
            track._replace(
                slots=[Slot(max(s.start, begin), min(s.end, end), s.stage, s.op) for s in track.slots
                       if s.start < end and s.end > begin],
                moves=[Move(max(m.start, float(begin)), min(m.end, float(end)), m.kind, m.stage) for m in track.moves
                       if m.start < end and m.end > begin],
            )
            for track in self.tracks
        ]  # fmt: skip
        return Recording(tracks, self.owner, self.name)

    @property
    def split(self) -> bool:
        """Whether backwards are two operations, I and W."""
        return any(slot.op.kind == "I" for track in self.tracks for slot in track.slots)

    def costs(self) -> list[dict[str, Time]]:
        """Mean seconds of F, B (or I and W) and U of every stage."""
        sums = [{kind: [0.0, 0] for kind in ("FIWU" if self.split else "FBU")} for _ in self.owner]
        for start, end, stage, op in self:
            entry = sums[stage][op.kind]
            entry[0] += float(end - start)
            entry[1] += 1
        return [{kind: total / count if count else 0.0 for kind, (total, count) in s.items()} for s in sums]

    def predicted(self, costs: Mapping[str, Time] | Sequence[Mapping[str, Time]] | None = None) -> Recording:
        """Return the same operations as the schedule predicts them, each as early as its stage, data and worker allow.

        costs: of F, B and U; None: the mean that was measured, stage by stage. Messages take no time.
        """
        return self._played(costs, by_stage=True)

    def in_order(self, costs: Mapping[str, Time] | Sequence[Mapping[str, Time]] | None = None) -> Recording:
        """Return what `predicted` does, but with each worker's operations in the order in which they were done.

        The difference to `predicted` is due to that order. What was measured beyond this is due to messages, to the
        time between operations, and to operations that do not always take the same time.
        """
        return self._played(costs, by_stage=False)

    def _played(self, costs: Mapping[str, Time] | Sequence[Mapping[str, Time]] | None, by_stage: bool) -> Recording:
        costs = self.costs() if costs is None else costs
        tracks = []
        for replica in sorted({track.replica for track in self.tracks}):
            mine = [track for track in self.tracks if track.replica == replica]
            workers = {track.worker: n for n, track in enumerate(mine)}
            did = [[(slot.stage, slot.op) for slot in track.slots] for track in mine]
            if by_stage:
                programs = [[(s, op) for some in did for t, op in some if t == s] for s in range(self.stages)]
                who = [workers[w] for w in self.owner]
            else:
                programs, who = did, list(range(len(mine)))
            slots: list[list[Slot]] = [[] for _ in mine]
            for slot in play(programs, who, self.stages, costs, _before(chain.from_iterable(did), self.stages)):
                slots[workers[self.owner[slot.stage]]].append(slot)
            tracks += [track._replace(slots=s, uncertainty=0.0, moves=()) for track, s in zip(mine, slots, strict=True)]
        return Recording(tracks, self.owner, self.name)

    def unit(self) -> Recording:
        """Return `predicted` with one unit of time for each F and B, and none for updates."""
        return self.predicted(UNIT)


def _before(did: Iterable[tuple[int, Op]], stages: int) -> set[Place]:
    """Return the operations before the recording began whose outputs it uses."""
    did = list(did)
    return {p for s, op in did if (p := needs(op, s, stages))} - {(op.kind, s, op.mb) for s, op in did}
