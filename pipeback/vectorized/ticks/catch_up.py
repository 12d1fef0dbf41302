"""Catch up: brings what stages know of themselves up to date after rounds that were done without any work per stage.

A round of a stage is F (forward), B (backward) and U (update) of one micro-batch each. Flights, versions, options and
the ledger are those that the rounds would have left, one by one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial

import torch

from pipeback.methods.momentum import velocity
from pipeback.runtime.ledger import Columns
from pipeback.runtime.worker import Worker
from pipeback.stages.joint_optimizer import Options
from pipeback.vectorized.buffers.version_ring import EntryVersions
from pipeback.vectorized.steps.row_state import of_velocities
from pipeback.vectorized.ticks.loss_stage import LossStage
from pipeback.vectorized.ticks.output_stage import OutputStage
from pipeback.vectorized.ticks.tick import StackTick
from pipeback.vectorized.ticks.updates_by_group import UpdatesByGroup

Used = tuple[Sequence[int], Sequence[int]]  # the versions of its weights on which a stage ran F and B, round by round


class Rounds:
    """The rounds of the stages of a worker. done: per stage, their number. f, b: per stage, the micro-batch of the
    first F and of the first B. turns: 1, or 2 where even and odd stages take turns; 0: micro-batches do.
    """

    def __init__(
        self, worker: Worker, done: Sequence[int], f: Sequence[int], b: Sequence[int], turns: int,
        groups: UpdatesByGroup | None, entered: EntryVersions | None,
    ) -> None:  # fmt: skip
        """groups: which have made the updates, if they are of several micro-batches. entered: tells the versions of F,
        where these are older than the newest.
        """
        self.worker, self.done, self.f, self.b, self.turns = worker, done, f, b, turns
        self.groups, self.entered = groups, entered

    def tell(
        self,
        moving: Sequence[StackTick],
        judge: LossStage | OutputStage | None,
        options: Mapping[int, Options],
        own: Container[int],
        *,
        stashes: bool,
    ) -> None:
        """Tell the stages of these stacks, the last stage, if it is a graph, and the ledger.

        options: those of the micro-batches. own: the stages whose state the method's own updates have kept. stashes:
        whether B has run on the weights of F.
        """
        worker, f, b = self.worker, self.f, self.b
        numbers = [s for one in moving for s in one.stack.numbers]
        used = [self._used(s, stashed=stashes) for s in numbers]
        newest = {s: fore for s, (fore, _) in zip(numbers, used, strict=True)}
        for one in moving:
            one.stack.moved_on(self.done, f, b, options, newest)
        if self.entered is not None:
            self._tell_entries(numbers, self.entered)
        if judge is not None and self.done[-1]:
            last, end = judge.stage, f[-1] + self.done[-1]
            numbers.append(last.index)
            used.append(self._used(last.index, stashed=False))
            last.went_backward(options[end - 1])
            last.note_flights(1)
        if worker.last in numbers:  # nobody needs them any more
            for i in range(f[worker.last], f[worker.last] + self.done[worker.last]):
                del worker.options[i]
        if count := sum(self.done[s] for s in numbers):
            others = sum(self.done[s] for s in worker.stages if s not in numbers)
            recorded = worker.ledger.take(2 * others) if others else ([], [], [])
            worker.ledger.put_off(2 * (count + others), partial(self._records, numbers, used, recorded))
        if self.groups is not None:
            self.groups.finish()
        for s in numbers:
            stage = worker.stages[s]
            if self.done[s] and self.groups is None:
                stage.updated(self.done[s])
                state = stage.state if s in own else worker.method.advanced(stage.state, self.done[s])
                stage.put_state(
                    {
                        name: velocity(stage.optimizer, stage.weights) if of_velocities(name) else value
                        for name, value in state.items()
                    }
                )
        for one in moving:
            if one.stash is not None:
                one.stash.give()
            if one.versions is not None:
                one.versions.give(self.done)
            one.leave()

    def _tell_entries(self, numbers: Sequence[int], entered: EntryVersions) -> None:
        """Tell flights and worker at which versions of stage 0 their micro-batches have entered."""
        worker, stages = self.worker, self.worker.stages
        for s in numbers:
            for flight in stages[s].flights.values():
                flight.entry = flight.version
        first, last = self.f[worker.last] + self.done[worker.last], self.f[0] + self.done[0]
        worker.entries = {i: entered.entry(stages[worker.last], i) for i in range(first, last)}
        worker.entered = entered.base + self.b[0] + self.done[0] - entered.start

    def _used(self, s: int, *, stashed: bool) -> Used:
        """Return the versions of its weights on which a stage ran F and B in these rounds."""
        stage, count = self.worker.stages[s], self.done[s]
        fore: Sequence[int] = range(stage.version, stage.version + count)
        if self.groups is not None:
            fore = self.groups.versions(stage, self.b[s], count)
        if self.entered is not None:
            fore = [self.entered.entry(stage, i) for i in range(self.f[s], self.f[s] + count)]
        return fore, [*(flight.version for flight in stage.flights.values()), *fore][:count] if stashed else fore

    def _records(self, numbers: Sequence[int], used: Sequence[Used], recorded: Columns) -> Columns:
        """Return what the ledger records of the rounds, tick by tick. recorded: by the other stages."""
        counts = torch.tensor([self.done[s] for s in numbers], device="cpu")
        rounds = torch.cat([torch.arange(self.done[s], device="cpu") for s in numbers])
        stages, f, b = (
            torch.tensor([some[s] for s in numbers], device="cpu").repeat_interleave(counts)
            for some in (range(self.worker.count), self.f, self.b)
        )
        fore, back = (
            torch.cat([torch.tensor(some[n], dtype=torch.long, device="cpu") for some in used]) for n in (0, 1)
        )
        columns = (2 * stages, 2 * stages + 1), (f + rounds, b + rounds), (fore, back)
        who, mbs, versions = (
            torch.cat([*some, torch.tensor(others, dtype=torch.long, device="cpu")])
            for some, others in zip(columns, recorded, strict=True)
        )
        stages, backward = who // 2, who % 2
        lead = torch.tensor([f - b for f, b in zip(self.f, self.b, strict=True)], device="cpu")[stages]  # of F before B
        ticks = self.turns * (mbs + backward * lead) + stages if self.turns else mbs + backward * lead
        at = torch.argsort((2 * ticks + backward) * self.worker.count + stages)
        return who[at].tolist(), mbs[at].tolist(), versions[at].tolist()
