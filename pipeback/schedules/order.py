"""Order: which operation may run next: a deterministic order over all stages, the same on every worker.

An operation is F (a forward), B (a backward) or U (an update); B may be split into I, the gradient of the input, and W,
that of the weights. Any order that respects the programs of the stages and the flow of data gives the same weights, bit
for bit. The default makes groups: forwards from the first stage on, then all backwards as one wave, then all updates.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, starmap
from operator import add
from typing import Any

from pipeback.schedules.flushes import Flushes, FlushSpan, next_flush, next_group
from pipeback.schedules.foreseen import Foreseen, richest
from pipeback.schedules.ops import Kind, Op, Schedule, until
from pipeback.schedules.placement import Placed
from pipeback.schedules.programs import Flowing
from pipeback.schedules.spans import Span, TurnSpan, following, next_span, next_turns
from pipeback.schedules.split import after, splits
from pipeback.schedules.warm_up import in_rounds, rounded
from pipeback.schedules.waves import Ops as Ops  # executors take both from here
from pipeback.schedules.waves import Wave as Wave
from pipeback.schedules.worker_turns import by_worker, firsts, programs, turns_of

POLICIES = ("grouped", "upstream", "sticky", "random", "streaming", "skewed")
FAR = 64  # the most operations that are looked at in advance
MANY = 4  # micro-batches of which forwards by ticks are worth their empty places


class Order:
    """The order in which the programs of all stages run; every worker has its own copy and does what is its part.

    policy      what runs next, of all that is ready:
    grouped     waves, the default
    upstream    one operation, of the first stage that has one
    sticky      one operation, of the same stage until it is blocked
    random      one operation, by a seeded draw
    streaming   as sticky; once blocked, one of the last `near` stages that were run, else the one that has most to do
    skewed      ticks; at each, a stage does at most one operation of each kind, of what its neighbours gave it at
                earlier ticks, so that no operation feeds another. `advance` leaves undone what the first stage need not
                wait for, and `rest` does it. `in_turn`: one micro-batch after the other
    """

    def __init__(self, schedule: Schedule, stages: int, *, policy: str = "grouped", seed: int = 0, near: int = 1,
                 by_group: bool = False) -> None:  # fmt: skip
        """by_group: whether `leap` does groups as a whole."""
        if policy not in POLICIES:
            raise ValueError(f"order {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        self.stages, self.policy = stages, policy
        self._near: deque[int] = deque(maxlen=near)  # the stages that were run last
        self.arrived = 0
        self._last = 0
        self._random = random.Random(seed)
        self._handed: Ops = ()  # the forwards of the last tick, which may not have been done yet
        # does ticks at which stages do the same, or a flush, and says how many; and is told when others follow
        self.leap: Callable[[Span], int] | None = None
        self.landed: Callable[[], None] = lambda: None
        self.by_group = by_group
        self.in_turn = self.apart = False  # apart: whether forwards of few micro-batches may be waves of their own then
        self.restart(schedule)

    def restart(self, schedule: Schedule) -> None:
        """Begin `schedule` anew at the next micro-batch that arrives; the pipeline must be empty."""
        n = self.stages
        self.schedule, self.start = schedule, self.arrived  # the programs count micro-batches from here
        self._back: Kind = "I" if splits(schedule, n) else "B"  # what another stage waits for
        self._flow = in_rounds(schedule, by_group=self.by_group) if self.policy == "skewed" else rounded(schedule)
        self._repeated: list[Wave] | None = None  # the waves of the last micro-batch, if the next has the same
        self._owed = 0  # micro-batches for which that was so, and by which the programs have not been advanced
        self._ends = False  # whether the programs end with a group, so that the next one can be done as a whole
        self._leapt = [0] * n  # rounds of each stage that `leap` has done, and by which they have not been either
        self.placed = schedule if isinstance(schedule, Placed) else None
        self._turns = turns_of(self.placed)  # of each worker, where these decide and not the policy
        self._programs: list[Iterator[Op]] = programs(schedule, n)
        if self.policy == "streaming" and self.placed is None:
            self._programs = [Foreseen(program) for program in self._programs]
        self._heads: list[Op | None] = firsts(self._programs)
        self._fetched = [1] * n  # operations taken from each program, the head included, W left out
        self.forwards, self.backwards, self.updated = [0] * n, [0] * n, [0] * n  # micro-batches since the start
        self.finished = [0] * n if self._back == "I" else self.backwards  # those whose W has been done

    @property
    def empty(self) -> bool:
        """Whether everything that arrived is in the weights of every stage."""
        return min(self.updated) == self.arrived - self.start

    def advance(self, arrived: int, done: Callable[[], bool] | None = None) -> Iterator[Wave]:
        """Every operation that data flow and programs allow once `arrived` micro-batches are there.

        done: with the policy `skewed`, ends them after a tick, as soon as it says so, be there input or not.
        """
        one = arrived == self.arrived + 1 and self.policy == "grouped" and isinstance(self._flow, Flowing)
        self.arrived = arrived
        if one and self._repeated is not None:
            yield from self._repeat()
            return
        self._move_on()
        if done is not None:
            yield from self._ticks(done)
            return
        if one:
            yield from self._watched()
        else:
            yield from self._ticks(until_input=True) if self.policy == "skewed" else self._waves()
        if any(self._leapt) or self.empty:
            return
        if all(h is not None and not self._awaits_input(s, h) for s, h in enumerate(self._heads)):
            raise RuntimeError("the schedule deadlocks: " + self._where())

    def rest(self, done: Callable[[], bool] | None = None) -> Iterator[Wave]:
        """Yield the waves that `advance` has left undone. done: ends them after a tick, as soon as it says so."""
        if self.policy == "skewed":
            self._move_on()
            yield from self._ticks(done)
            if done is None:
                self._land()

    def at_last(self) -> bool:
        """Whether the newest micro-batch has come to the last stage, whose next operation is its forward."""
        newest, head = self.arrived - self.start - 1, self._heads[-1]
        come = self.forwards[-1] == newest and (self.stages == 1 or self.forwards[-2] > newest)
        return come and (bool(self._leapt[-1]) or (head is not None and head.kind == "F"))

    def close(self, arrived: int) -> Iterator[Wave]:
        """Yield the waves that finish all that has arrived, with its last update; `restart` begins again."""
        yield from self.advance(arrived)
        yield from self.rest()
        n, self._turns = arrived - self.start, []
        for s, program in enumerate(self._programs):
            rest = until(self._rest(s, program), n, self.finished[s], self.updated[s])
            self._programs[s] = Foreseen(rest) if self.policy == "streaming" else rest
            self._heads[s] = next(self._programs[s], None)
        yield from self._ticks() if self.policy == "skewed" else self._waves()
        if not self.empty:
            raise RuntimeError("the schedule deadlocks at its end: " + self._where())

    def state(self) -> dict[str, Any]:
        """Plain numbers from which `resume` finds this place again; only between `advance` calls."""
        fetched = [a + self._ops(s, self._owed + self._leapt[s]) for s, a in enumerate(self._fetched)]
        counts = {"forwards": list(self.forwards), "backwards": list(self.backwards), "updated": list(self.updated)}
        return {"arrived": self.arrived, "start": self.start, "fetched": fetched, **counts}

    def resume(self, schedule: Schedule, state: dict[str, Any]) -> None:
        """Take up `schedule` where `state` was taken."""
        self.arrived = state["start"]
        self.restart(schedule)
        self.arrived = state["arrived"]
        for s, fetched in enumerate(state["fetched"]):
            if fetched > 1:
                self._heads[s], self.finished[s] = after(self._programs[s], fetched - 2)
        self._fetched = list(state["fetched"])
        self.forwards, self.backwards = list(state["forwards"]), list(state["backwards"])
        self.finished = self.finished if self._back == "I" else self.backwards
        self.updated = list(state["updated"])

    def withdraw(self) -> None:
        """With the policy `skewed`: note that the forwards of the last tick were not done, since that of the first
        stage has failed. They are yielded again, but the failed micro-batch and those after it have not arrived.
        """
        for s, i in self._handed:
            head = self._heads[s]
            self._programs[s] = chain([] if head is None else [head], self._programs[s])
            self._heads[s] = Op("F", i - self.start)
            self.forwards[s] -= 1
            self._fetched[s] -= 1
        self._handed = ()
        self.arrived = self.start + self.forwards[0]

    def _ready(self, s: int) -> bool:
        if (head := self._heads[s]) is None:
            return False
        kind, i = head
        if kind == "F":
            return i < (self.forwards[s - 1] if s else self.arrived - self.start)
        if kind in ("B", "I"):
            return s == self.stages - 1 or i < self.backwards[s + 1]
        return True

    def _awaits_input(self, s: int, head: Op) -> bool:
        return s == 0 and head.kind == "F" and head.mb >= self.arrived - self.start

    def _take(self, s: int, head: Op) -> tuple[int, int]:
        """Count the next operation of stage s as run, and fetch the one after it."""
        kind, i = head
        if kind == "F":
            done, turn = self.forwards, self.forwards[s]
        elif kind in ("B", "I"):
            done, turn = self.backwards, self.backwards[s] if i < self.forwards[s] else -1
        elif kind == "W":
            done, turn = self.finished, self.finished[s] if i < self.backwards[s] else -1
        else:
            done, turn = self.updated, self.finished[s] - 1
        if i != turn:
            raise RuntimeError(
                f"stage {s}: {head} is out of turn; a program takes micro-batches in order, forward before backward, "
                "and an update names the last micro-batch gone backward"
            )
        done[s] = i + 1
        if kind == "B":
            self.finished[s] = i + 1
        self._heads[s] = next(self._programs[s], None)
        self._fetched[s] += kind != "W"
        return s, i + self.start

    def _waves(self) -> Iterator[Wave]:
        if self._turns or self.policy != "grouped":
            columns = self._heads, self.forwards, self.backwards, self.finished, self.updated, self._fetched
            in_turn = starmap(Wave, by_worker(self._turns, self._ready, self._take, columns))
            yield from in_turn if self._turns else self._singles()
            return
        heads, take, last = self._heads, self._take, self.stages - 1
        forwards, backwards, back = self.forwards, self.backwards, self._back
        while True:
            ops: list[tuple[int, int]] = []
            upstream = self.arrived - self.start  # forwards that the stage before has done
            for s, head in enumerate(heads):
                if head is not None and head[0] == "F" and head[1] < upstream:
                    ops.append(take(s, head))
                upstream = forwards[s]
            if ops:
                yield Wave("F", ops)
                continue
            # from the first stage on, so that a backward counts what its neighbour had done before this wave
            for s, head in enumerate(heads):
                if head is not None and head[0] == back and (s == last or head[1] < backwards[s + 1]):
                    ops.append(take(s, head))
            if ops:
                yield Wave(back, ops)
                continue
            if back == "I" and (ops := self._due("W")):
                yield Wave("W", ops)
                continue
            if not (ops := self._due("U")):
                return
            yield Wave("U", ops)

    def _watched(self) -> Iterator[Wave]:
        """Yield `_waves`, and note whether the next micro-batch will make the same."""
        before = [*self.forwards, *self.backwards, *self.updated]
        waves = []
        for wave in self._waves():
            waves.append(wave)
            yield wave
        after = [*self.forwards, *self.backwards, *self.updated]
        if all(b - a == 1 for a, b in zip(before, after, strict=True)):  # every stage has done one round
            self._repeated = waves

    def _repeat(self) -> Iterator[Wave]:
        """Yield the waves of the last micro-batch, renumbered for the next."""
        assert self._repeated is not None
        for done in (self.forwards, self.backwards, self.updated):
            done[:] = [n + 1 for n in done]
        self._owed += 1
        self._repeated = waves = [Wave(kind, [(s, i + 1) for s, i in ops]) for kind, ops in self._repeated]
        yield from waves

    def _move_on(self) -> None:
        """Advance the programs to where `_repeat` has counted."""
        if self._owed:
            self._begin_rounds([self._owed] * self.stages)
        self._owed, self._repeated = 0, None

    def _begin_rounds(self, done: Sequence[int]) -> None:
        """Begin the programs after the rounds that each stage has done."""
        assert self._flow is not None
        for s, first in enumerate(self.backwards):
            self._programs[s] = self._flow.rounds(s, self.stages, first)
            self._heads[s] = next(self._programs[s])
            self._fetched[s] += self._ops(s, done[s])

    def _ops(self, s: int, rounds: int) -> int:
        """The operations of the last so many rounds of a stage: F, B and, after every so many, U."""
        flow, n = self._flow, self.backwards[s]
        return 2 * rounds + (flow.updated(n) - flow.updated(n - rounds)) // flow.every if flow and rounds else 0

    def _ticks(self, done: Callable[[], bool] | None = None, *, until_input: bool = False) -> Iterator[Wave]:
        """Yield the waves of ticks while anything can be done. until_input: stop once the first stage awaits input."""
        lead = None  # forwards that a stage may be ahead of the next stage's backwards, where stages take turns
        if self._flow is not None and self._flow.turns == 2:
            lead = range(self.stages - 1, -1, -1)
        busy, foreseen, alone = True, None, False
        while busy and not (until_input and self._idles()) and not (done is not None and done()):
            self._handed, told, foreseen = (), foreseen, None
            if self.leap is not None and (span := told or self._span()):
                if leapt := self.leap(span):
                    self.skip(span, leapt)
                    foreseen = following(span, self.forwards, self.backwards, self.backwards, self.arrived - self.start)
                    continue
                if isinstance(span, TurnSpan):  # then by ticks
                    self.in_turn, alone = False, self.apart and span.ticks < MANY
                    continue
            if any(self._leapt) and (more := self.turns(self.arrived + 1)) and more.ticks == 1:
                return  # nothing is left to do, and what leaps goes on with the next micro-batch
            self._land()
            came = self.arrived - self.start
            if alone or (self.apart and isinstance(self._flow, Flushes) and came - self.forwards[0] < MANY):
                yield from self._forwards()  # where no ticks are leapt, either
            busy = False
            given, back = [came, *self.forwards], [*self.backwards[1:], self.arrived]
            most = given if lead is None else [min(*pair) for pair in zip(given, map(add, back, lead))]
            due: list[tuple[Kind, Any]] = [("F", most), (self._back, back), ("W", None), ("U", None)]
            for kind, below in due:
                if ops := self._due(kind, below):
                    busy, self._handed = True, ops if kind == "F" else self._handed
                    yield Wave(kind, ops)

    def _forwards(self) -> Iterator[Wave]:
        """Yield a forward of every stage that can do one, each alone, since one feeds another."""
        came = self.arrived - self.start
        for s, head in enumerate(self._heads):
            if head is not None and head.kind == "F" and head.mb < came:
                self._handed = [self._take(s, head)]
                yield Wave("F", self._handed)
            came = self.forwards[s]

    def _due(self, kind: Kind, below: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Take the next operation of every stage where it is of this kind, and its micro-batch is below this number."""
        heads = [(s, head) for s, head in enumerate(self._heads) if head is not None and head[0] == kind]
        return [self._take(s, head) for s, head in heads if below is None or head[1] < below[s]]

    def _idles(self) -> bool:
        """Whether the first stage awaits input."""
        if self._leapt[0]:  # it is between two rounds, which begin with a forward
            return self.forwards[0] >= self.arrived - self.start
        return self._heads[0] is not None and self._awaits_input(0, self._heads[0])

    def _span(self) -> Span | None:
        if isinstance(flow := self._flow, Flushes):
            return self._group(flow) if self.by_group else None
        return (self.turns(self.arrived) if self.in_turn else None) or self._in_rounds(next_span, self.arrived)

    def turns(self, arrived: int) -> TurnSpan | None:
        """Return the micro-batches that can go through all stages one by one, once so many have arrived."""
        return self._in_rounds(next_turns, arrived)  # type: ignore[no-any-return]

    def _in_rounds(self, find: Callable[..., Any], arrived: int) -> Any:
        if (flow := self._flow) is None or not flow.turns or self.backwards[0] < flow.begins:
            return None
        updated = self.updated if flow.every == 1 else self.backwards  # a tick has the updates that are due
        return find(flow.turns, self.forwards, self.backwards, updated, arrived - self.start)

    def _group(self, flow: Flushes) -> FlushSpan | None:
        """Return the group that begins now; if one can soon, leave the forwards after it until it does."""
        arrived, end = self.arrived - self.start, next_group(flow, self.forwards, self.arrived - self.start)
        if not self._ends and end is not None:
            self._ends = True
            for s, program in enumerate(self._programs):
                self._programs[s] = until(self._rest(s, program), end, self.backwards[s], self.updated[s])
                self._heads[s] = next(self._programs[s], None)
        return next_flush(flow, self.forwards, self.backwards, self.updated, arrived)

    def skip(self, span: Span, ticks: int) -> None:
        """Count as done so many ticks of a span."""
        every, step = span.stages, span.stages.step
        some = slice(every.start, every.stop, step) if ticks == 1 else slice(None)
        # of two turns, that of these stages comes first
        more = [(ticks + step - 1 - (s - every.start) % step) // step for s in range(self.stages)[some]]
        for done in (self.forwards, self.backwards, self._leapt):
            done[some] = map(add, done[some], more)
        self.updated[some] = map(self._flow.updated, self.backwards[some])  # type: ignore[union-attr]

    def _land(self) -> None:
        """Go on with the programs after rounds that `leap` has done."""
        self.landed()
        if any(self._leapt) or (self._ends and not any(self._heads)):
            self._ends = False
            leapt, self._leapt = self._leapt, [0] * self.stages
            self._begin_rounds(leapt)

    def _singles(self) -> Iterator[Wave]:
        while ready := [s for s in range(self.stages) if self._ready(s)]:
            if self.policy == "random":
                s = self._random.choice(ready)
            elif self.policy != "upstream" and self._last in ready:
                s = self._last
            else:
                s = richest(ready, self._near, self._run) if self.policy == "streaming" else ready[0]
            self._last = s
            if (head := self._heads[s]) is not None:  # it is ready
                yield Wave(head.kind, [self._take(s, head)])

    def _run(self, s: int) -> int:
        """How many operations stage s could do in a row now."""
        head, program = self._heads[s], self._programs[s]
        assert head is not None and isinstance(program, Foreseen)
        forwards = self.forwards[s - 1] if s else self.arrived - self.start
        backwards = self.backwards[s + 1] if s + 1 < self.stages else forwards
        return program.run(head, forwards, backwards, FAR)

    def _rest(self, s: int, program: Iterator[Op]) -> Iterator[Op]:
        if (head := self._heads[s]) is not None:
            yield head
        yield from program

    def _where(self) -> str:
        return ", ".join(f"stage {s} waits for {h}" for s, h in enumerate(self._heads) if h is not None)
