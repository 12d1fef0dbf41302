"""A fit that several ranks share: each holds some neighbouring stages; rank 0 has the last ones and the loss.

With `tensor_parallel`, neighbouring ranks are one worker, and hold shards of its stages. Those of the last worker all
compute the loss; rank 0 is one of them.

A rank with the loss runs `training_step` to its end. On the others it ends where it calls the model: the micro-batch
is then in the pipeline, and Lightning gets a loss of zero, whose backward runs B and U of the rank's stages. When the
model is called without gradients, as in validation, the pipeline evaluates it, and every rank gets the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.checkpoint import pipeline_state
from pipeback.distributed.ranks import Ranks
from pipeback.lightning import find_stages
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.fit import Fit
from pipeback.lightning.fit_state import FitState, without
from pipeback.lightning.one_device import trained
from pipeback.lightning.ranks.dtype_turns import DtypeTurns
from pipeback.lightning.ranks.fit_shards import FitShards
from pipeback.lightning.ranks.meeting import Meeting
from pipeback.lightning.ranks.module_shell import ModuleShell
from pipeback.lightning.ranks.rank_sync import agree
from pipeback.pipeline.arguments import Clipping, Processes, TensorParallel
from pipeback.pipeline.pipeline import Pipeline
from pipeback.private import pytree
from pipeback.runtime.runners import Judge
from pipeback.splitting.refusals import Unmade
from pipeback.splitting.split import Split
from pipeback.streaming.store import Store

OBJECTS = (
    "With several devices, the stages have copies of the LightningModule's modules. These stand for modules in its "
    "attributes, and in lists, tuples and dictionaries there, but not in objects of other classes: use one of those."
)


class SharedFit:
    """The part of a fit that one rank of several does. All ranks make the same calls in the same order."""

    several = True

    def __init__(
        self,
        meeting: Meeting,
        processes: Processes,
        facts: dict[str, Any],
        module: LightningModule,
        found: TrainedModule,
        optimizer: torch.optim.Optimizer,
        tensor: TensorParallel,
    ) -> None:
        self.meeting, self.processes, self.module, self.found = meeting, processes, module, found
        self.failed = False
        self.tensor = tensor
        self.shards = FitShards(tensor, meeting.shard)
        self._pipe: Pipeline | None = None
        self._hollow: ModuleShell
        self._let_go: Callable[[], None] = _nothing
        self._clip: tuple[float | None, float | None] | None = None
        self._turns = DtypeTurns(module.trainer.precision)
        meeting.rest = self._turns.rest
        agree(meeting, module, found, optimizer, facts)

    @property
    def hollow(self) -> bool:
        """Whether the user's module is without weights."""
        return self._pipe is not None and self._hollow.empty

    # -- building ------------------------------------------------------------------------------------------------

    def elsewhere(self, store: Store | None) -> str | None:
        return "over several devices, .grad is None for all weights of the stages"

    def split(self, example: Any) -> Split:
        hollow = self._hollow = ModuleShell(self.found, self.module)
        spread = self.shards.spread(hollow.copy, self.found.module)
        try:
            split = hollow.split or self.found.cut(hollow.copy, example)
            split = replace(split, spread=spread, rest=self._turns.rest)
        except Unmade as error:
            if self.found.step is not None:
                error.add_note(OBJECTS)
            raise
        hollow.cut(split)
        if len(split.parts) < self.meeting.workers:
            raise ValueError(find_stages.few(hollow.shown, len(split.parts), self.meeting.workers))
        for part in split.parts:
            self._turns.guard(part.module)
        return split

    def trained(self, split: Split) -> list[list[nn.Parameter]]:
        copied = zip(self._hollow.copy.parameters(), self.found.module.parameters(), strict=True)
        known = {id(mine): theirs for mine, theirs in copied}
        return [[known[id(p)] for p in stage] for stage in trained(split)]

    def piece(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        return self.shards.piece(p, state)

    def pipeline(self, split: Split, **options: Any) -> Pipeline:
        clipping: Clipping = options["clip_norm"]
        self._clip = clipping.norm, clipping.value
        processes = replace(self.processes, mesh=self.meeting.mesh)
        options["tensor_parallel"] = self.tensor  # its plan may be that of configure_model
        pipe = self._pipe = Pipeline(split, loss=None, workers=processes, **options)
        assert isinstance(pipe.ranks, Ranks)
        self.meeting.health = pipe.ranks.health
        return pipe

    # -- F, B and U ----------------------------------------------------------------------------------------------

    @contextmanager
    def training_step(self) -> Iterator[None]:
        self._turns.mine()
        try:
            yield
        finally:
            if self.hollow:  # training_step had replaced its forward
                self._let_go()

    def judging(self) -> AbstractContextManager[None]:
        return self._turns.taken()

    def enter(self, fit: Fit, xs: list[Any], expected: int, judge: Judge | None = None) -> list[Any] | None:
        assert fit.pipe is not None
        self._hollow.check_writes()
        self._follow(fit)
        outputs = fit.pipe.forward_many(xs, expected=expected, judge=judge)
        if not self.hollow:
            self._hollow.check()
            self._empty(fit)
        return outputs if self.meeting.loss else None

    def _follow(self, fit: Fit) -> None:
        if self._hollow.changed():
            with fit.quiet():
                self._hollow.follow()

    def forget(self, pipe: Pipeline) -> None:
        raise RuntimeError(
            "the backward of a micro-batch was skipped on rank 0, but the other ranks have gone on with it; with "
            "several devices every micro-batch goes backward: multiply its loss by zero instead"
        )

    def clips(self, norm: float | None, value: float | None) -> bool:
        before, self._clip = self._clip, (norm, value)
        return before != self._clip

    def stepped(self, fit: Fit) -> None:
        """Lend the user the state of weights in a store; nobody can write weights that are in no module."""
        if fit.pipe is not None and fit.store is not None:
            fit.twins.collect()

    # -- the user's module ---------------------------------------------------------------------------------------

    def _elsewhere(self, fit: Fit, *inputs: Any, **named: Any) -> Any:
        """The forward of the user's module, which is without weights, outside of F."""
        assert fit.pipe is not None
        self._hollow.check_call(inputs, named, after=fit.called)
        with fit.at_work():
            return _to(self.module.device, fit.pipe.evaluate(self.found.given(inputs, named)))

    def _empty(self, fit: Fit) -> None:
        self._let_go = partial(self._hollow.let_go, partial(self._elsewhere, fit))
        self._let_go()
        fit.twins.collect()

    def _fill(self, state: FitState, to: int | None) -> None:
        """Give the module its values on the rank `to`; None: on all ranks."""
        self._meet("the shards of the weights")
        with state.shown():
            mine = self.shards.whole(self._hollow.values())
        parts = self.meeting.gather("the weights of all stages", {} if self.meeting.shard else mine, to)
        if parts:
            values = {name: value for part in parts for name, value in part.items()}
            self._hollow.fill(values, self.module.device)

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, state: FitState) -> None:
        if not state.lost and state.fit.pipe is not None:
            self._follow(state.fit)
            state.fit.drain()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""
        self.failed = True
        if self._pipe is not None:
            self._pipe.ranks.failed(error)

    def leave(self, state: FitState) -> None:
        """Make the module whole again on every rank, and the optimizer's state on rank 0; close the pipeline."""
        fit = state.fit
        if state.left or fit.pipe is None:
            return
        if not state.lost:
            state.last, states = state.in_flight(), self._optimizer_states(state)
            if self.hollow:
                self._fill(state, to=None)
            parameters = [p for group in fit.optimizer.param_groups for p in group["params"]]
            for n, found in states.items():
                fit.optimizer.state[parameters[n]] = found
            self.meeting.gather("the end of fit")
            state.left = True
        self._hollow.restore()
        self.meeting.health, self.meeting.rest = None, nullcontext
        self._turns.mine(False)
        fit.pipe.close()

    # -- validation and checkpoints ------------------------------------------------------------------------------

    @contextmanager
    def validation(self, state: FitState) -> Iterator[None]:
        if not self.hollow or self._hollow.serves:
            yield
            return
        self._fill(state, to=None)
        yield
        self._empty(state.fit)

    @contextmanager
    def whole(self, state: FitState) -> Iterator[None]:
        with state.fit.quiet():
            if state.lost or not self.hollow:
                yield
                return
            self._fill(state, to=0)
            try:
                yield
            finally:
                self._empty(state.fit)

    def optimizer_state(self, state: FitState) -> dict[str, Any]:
        found = state.fit.optimizer.state_dict()
        states = found["state"] if state.left else self._optimizer_states(state)
        return {**found, "state": {n: s for n, s in states.items() if s}}

    def _optimizer_states(self, state: FitState) -> dict[int, Any]:
        """The optimizer's state by parameter, in the order of a single device; on rank 0."""
        fit = state.fit
        weights = [p for group in fit.optimizer.param_groups for p in group["params"]]
        self._meet("the shards of the optimizer's state")
        with state.shown():
            fit.twins.collect()  # the state of stages that run as one lies elsewhere since then
            mine = self.shards.states(fit.twins.state_dict()["state"], weights)
            parts = self.meeting.gather("the optimizer's state", {} if self.meeting.shard else _to("cpu", mine), 0)
        every = {n: found for part in parts for n, found in part.items()}
        return {n: every[n] for n in fit.optimizer.state_dict()["state"] if n in every}

    def in_flight(self, state: FitState) -> dict[str, Any]:
        fit = state.fit
        assert fit.pipe is not None
        self._meet("the shards in flight")
        with fit.at_work():
            mine, plain = fit.pipe.share(), fit.pipe.plain()
        left_out = state.left_out
        mine = mine._replace(parts=[part._replace(tensors=without(left_out, part.tensors)) for part in mine.parts])
        shares = self.meeting.gather("the micro-batches in flight", None if self.meeting.shard else mine, 0)
        return pipeline_state.merge([each for each in shares[::-1] if each is not None], plain) if shares else {}

    def fresh(self, pipe: Pipeline) -> dict[str, Any]:
        self._meet("the shards of a new pipeline")
        return pipeline_state.merge([pipe.share()], pipe.plain())

    def taken_up(self, fit: Fit, section: dict[str, Any]) -> None:
        if section["state"]["plain"]["loops"]:
            self._empty(fit)

    def _meet(self, what: str) -> None:
        """Wait for ranks that may still be in code of their own, before shards are exchanged within a time limit."""
        if self.shards.size > 1:
            self.meeting.gather(what)


def _nothing() -> None:
    """Do nothing, since the module still has its weights."""


def _to(device: Any, value: Any) -> Any:
    """Move every tensor in a structure to that device."""
    return pytree.tree_map(lambda part: part.to(device) if isinstance(part, Tensor) else part, value)
