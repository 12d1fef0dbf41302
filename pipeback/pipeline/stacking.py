"""Stacking: which stages of a pipeline run as one (`vectorize=`). Stacks are made of stages of one worker, once it is
known which these are, and tried on the first micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeback.counts import counted, numbered
from pipeback.pipeline.build import Built
from pipeback.pipeline.rehearsals import Form, Relay, form_of, smallest
from pipeback.pipeline.slices import unlike
from pipeback.runtime.loop import Batch
from pipeback.schedules.flushes import in_flushes
from pipeback.splitting.partition import balance
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators

SHARED = (
    "replicas whose stores share the weights bring the same stages at the same time, so that times may not decide what "
    "runs as one; with vectorize=True, stages that are alike do"
)


class Stacking:
    """The stacks of the pipeline that was built. told: for each, by its name, whether its stages run as one."""

    def __init__(self, built: Built) -> None:
        options = built.options
        self._asked, self._compile, self._graphed = options.vectorize, options.compile, built.graphed
        self._holding, self._method, self._worker = built.holding, built.method, built.setting.worker
        self.stacks: list[Any] = list(built.setting.stacks)
        self.told: dict[str, str] = {}
        if options.vectorize and not self.stacks and built.holding.most_as_one is not None:
            from pipeback.vectorized.stacks.choose_stacks import STREAMED, streams_flushes

            if streams_flushes(built.method):
                self.told[numbered("stage", range(len(built.holding.stages)))] = f"stage by stage: {STREAMED}"
            elif options.vectorize == "auto" and built.holding.shards:
                self.told[numbered("stage", range(len(built.holding.stages)))] = f"stage by stage: {SHARED}"
        # until it is known which stages a worker has
        self._waits = bool(options.vectorize) and built.holding.later and not self.told
        self._tried = False
        self._seen: list[Any] = []  # what micro-batches give to the stages
        self._new: Mapping[Form, Batch] = {}  # those micro-batches, by their form
        self._known = set[tuple[Form, tuple[int, ...]]]()  # forms for which there are graphs, by the stacks' modes
        # where the loss is computed outside, how many micro-batches go forward before the last of them has been judged
        self._together: int | None = None
        self._outside = options.loss is None
        self._pushed = 1  # the micro-batches of the push on which stacks are tried

    @property
    def on(self) -> bool:
        """Whether stages may run as one."""
        return self._waits or bool(self.stacks)

    def choose(self) -> None:
        """Make stacks of stages of the same worker, which are known from now on, where they then lie."""
        if not self._waits:
            return
        self._waits = False
        from pipeback.vectorized.stacks.choose_stacks import stacked  # here, since most pipelines have no stacks

        owner = self._holding.balance() if self._holding.shared else None
        count, most = len(self._holding.stages), self._holding.most_as_one
        self.stacks = [
            stack
            for stages in self._own
            for stack in stacked(stages, self._method, self._compile, self._graphed, count, owner, most)
        ]

    @property
    def _flush(self) -> int:
        """The micro-batches of a flush that this worker does at once; 0 if there is none."""
        from pipeback.vectorized.flushes.whole_flush import PARTS
        from pipeback.vectorized.stacks.eligible import flushes

        if not flushes(self._method, outside=self._outside, shared=self._holding.shared):
            return 0
        found = in_flushes(self._method.schedule_at(0, self._pushed))
        if found is None or found.every == 1:  # a single one gains nothing
            return 0
        return -(-found.every // PARTS) if self._holding.shared else found.every

    @property
    def _own(self) -> list[list[Stage]]:
        """The stages of this process, for every replica."""
        mine = {id(stage) for stage in self._holding.mine}
        return [[stage for stage in stages if id(stage) in mine] for stages in self._holding.everywhere]

    def unseen(self, batches: Sequence[Batch]) -> list[Batch]:
        """One micro-batch of each form for which stacks have made no graphs yet.

        They make them before such micro-batches are let in, since torch borrows the default random generator for it,
        from which others may draw while threads train. Over ranks, no thread does, and graphs are made when they come.
        """
        if self._holding.ranks.several or not any(stack.eras.worth for stack in self.stacks):
            return []
        modes = self._modes
        return [batch for form, batch in _forms(batches).items() if (form, modes) not in self._known]

    @property
    def _modes(self) -> tuple[int, ...]:
        return tuple(stack.mode for stack in self.stacks)

    def see(self, batches: Sequence[Batch], relay: Relay | None) -> None:
        """Find out what micro-batches give to the stages. relay: None: all stages are in this process."""
        from pipeback.vectorized.stacks.stage_inputs import StageInputs

        self._seen, self._new = [], _forms(batches)
        self._together = len(batches) if self._outside else None
        self._pushed = len(batches)
        for x, y, _ in (batches[0], smallest(batches)) if self._holding.ranks.several else self._new.values():
            seen = StageInputs()

            def part(stages: Sequence[Stage], value: Value, seen: StageInputs = seen, y: Any = y) -> Value:
                for stage in stages:
                    with self._holding.present(stage):
                        value = seen.through(stage, value, y)
                return value

            if relay is None:
                part(self._holding.stages, x)
            else:
                relay(x, part)
            self._seen.append(seen)

    def fit(self, current: Options) -> bool:
        """Keep the stacks that can run as one on these micro-batches, and should; return whether they are others.

        Raises ValueError where `vectorize` demands a stack and none can run as one; over ranks, `meet` does.
        """
        from pipeback.vectorized.stacks.fit_stacks import Request, fitting

        holding = self._holding
        asked = Request(
            self._method, self._asked, current, self._worker, len(holding.stages), self._together, self._flush,
            holding.most_as_one, holding.all_present, graphed=self._graphed, pushed=self._pushed,
            apart=holding.ranks.several,
        )  # fmt: skip
        found: list[Any] = []
        told: dict[str, str] = {}
        for replica in sorted({stack.stages[0].replica for stack in self.stacks}):
            mine = [stack for stack in self.stacks if stack.stages[0].replica == replica]
            with accelerators.under(()):  # the stages enter it by themselves
                kept, reasons = fitting(mine, self._seen, asked, again=self._tried)
            told = told or reasons
            found += kept
        if not self._tried:
            self.told = told  # what stacks find out later is told in it, too
        self._tried, self._seen, changed = True, [], found != self.stacks
        self.stacks = found
        self._known |= {(form, self._modes) for form in self._new}
        self._new = {}
        return changed

    def meet(self) -> None:
        """Tell all ranks what each has found. Raises ValueError on all where `vectorize` demands a stack and none has
        one.
        """
        ranks = self._holding.ranks
        if not ranks.several:
            return
        found = ranks.gather((self.told, bool(self.stacks)), "push()")
        self.told.clear()  # what stacks find out later is told in it
        for told, _ in found:
            self.told |= told
        if self._asked not in (False, "auto") and not any(kept for _, kept in found):
            from pipeback.vectorized.stacks.fit_stacks import none_can

            raise none_can(self._asked, self.told)

    def check(self, plain: Mapping[str, Any]) -> None:
        """Raise ValueError if a state has micro-batches in flight as one where its stages do not run as one here."""
        groups = _groups(plain)
        if groups and not self._asked:
            raise ValueError(
                f"the state has micro-batches in flight in {numbered('stage', groups[0])}, which ran as one and can "
                "only go on in a stack; build the pipeline with vectorize=True, or save it drained"
            )
        store = self._holding.store
        for group in groups:
            if store is not None and len(group) > store.prefetch + 1:
                raise ValueError(
                    f"the state has micro-batches in flight in {numbered('stage', group)}, which ran as one, but "
                    f"{counted(len(group), 'stage')} have no room on the device at once with "
                    f"prefetch={store.prefetch}; build the store with prefetch={len(group) - 1}, or save the state "
                    "drained"
                )
        owner = balance(plain["seconds"], self._holding.workers)
        for group in groups:
            if len({owner[s] for s in group}) > 1:
                then, here = (f"{counted(n, 'worker')} or ranks" for n in (plain["workers"], self._holding.workers))
                raise ValueError(
                    f"the state has micro-batches in flight in {numbered('stage', group)}, which ran as one; it was "
                    f"saved with {then}, and this pipeline has {here}, which share these stages; build it with "
                    f"workers={plain['workers']}, run it over as many ranks (devices={plain['workers']} under "
                    "Lightning), or save the state drained"
                )

    def regroup(self, plain: Mapping[str, Any]) -> None:
        """Let those stages run as one that did in a state, as far as it has micro-batches in flight there."""
        self.choose()
        groups = _groups(plain)
        if not groups:
            return
        from pipeback.vectorized.stacks.choose_stacks import regrouped

        found: list[Any] = []
        for stages in self._own:
            here = {stage.index: stage for stage in stages}
            mine = [stack for stack in self.stacks if stack.stages[0] in stages]
            some = [group for group in groups if here.keys() >= set(group)]
            count, most = len(self._holding.stages), self._holding.most_as_one
            found += regrouped(here, mine, some, self._method, self._compile, self._graphed, count, most)
        self.stacks = found


def _groups(plain: Mapping[str, Any]) -> list[list[int]]:
    """Return the stages of each stack in which a state has micro-batches in flight."""
    rows = [p["row"] for part in plain["stages"] for p in part.get("flights", {}).values() if p.get("row")]
    return [list(group) for group in sorted({tuple(row[-1]) for row in rows})]


def _forms(batches: Sequence[Batch]) -> dict[Form, Batch]:
    """One micro-batch of each form, the first of all at the front."""
    found: dict[Form, Batch] = {}
    for batch in unlike(batches):
        found.setdefault(form_of(batch), batch)
    return found
