"""A fit that several ranks share: each holds some neighbouring stages, rank 0 the last ones and the loss.

Rank 0 runs `training_step` to its end. On the others it ends where it calls the model: the micro-batch is in the
pipeline then, and what Lightning goes on with is a loss of zero that leads to B and U of the own stages. Called without
gradients, to validate, the model asks the pipeline, and every rank gets its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.checkpoint import pipeline_state
from pipeback.distributed.ranks import Ranks
from pipeback.lightning import find_stages, step_checks
from pipeback.lightning.lasting import Lasting, without
from pipeback.lightning.ranks.dtype_turns import DtypeTurns
from pipeback.lightning.ranks.meeting import Meeting
from pipeback.lightning.ranks.module_shell import ModuleShell
from pipeback.lightning.ranks.rank_sync import agree
from pipeback.pipeline.pipeline import Pipeline
from pipeback.private import pytree
from pipeback.splitting.split import Split


class Handed(BaseException):
    """The micro-batch is in the pipeline: what else `training_step` does is rank 0's. Not for `except Exception`."""


class SharedFit(Lasting):
    """What one rank does of a fit. Ranks make the same calls in the same order."""

    def __init__(self, meeting: Meeting, timeout: float, facts: dict[str, Any], *given: Any) -> None:
        module, found, optimizer, *_ = given
        self.meeting, self.timeout, self.first = meeting, timeout, meeting.rank == 0
        self.failed = False
        self._handed = 0  # micro-batches that wait for their backward, on ranks without the loss
        self._hollow: ModuleShell
        self._clip: tuple[float | None, float | None] | None = None
        self._turns = DtypeTurns(module.trainer.precision)
        meeting.rest = self._turns.rest
        agree(meeting, module, found, optimizer, facts)
        super().__init__(*given)

    def _split(self, example: Any) -> Split:
        hollow = self._hollow = ModuleShell(self.found, self.module)
        split = hollow.split or self.found.cut(hollow.copy, example)
        if len(split.parts) < self.meeting.world:
            raise ValueError(find_stages.few(self.found.name, len(split.parts), self.meeting.world))
        for part in split.parts:
            self._turns.guard(part.module)
        return split

    def _trained(self, split: Split) -> list[list[nn.Parameter]]:
        copied = zip(self._hollow.copy.parameters(), self.found.module.parameters(), strict=True)
        known = {id(mine): theirs for mine, theirs in copied}
        return [[known[id(p)] for p in stage] for stage in super()._trained(split)]

    def _pipeline(self, split: Split, **options: Any) -> Pipeline:
        self._clip = options["clip_norm"], options["clip_value"]
        pipe = Pipeline(split, loss=None, mesh=self.meeting.mesh, timeout=self.timeout, **options)
        assert isinstance(pipe.ranks, Ranks)
        self.meeting.health = pipe.ranks.health
        return pipe

    @property
    def hollow(self) -> bool:
        """Whether the user's module is without weights."""
        return self.pipe is not None and self._hollow.empty

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with super()._at_work(), self._turns.rest():
            yield

    # -- F, B and U ----------------------------------------------------------------------------------------------

    def _one(self, step: Callable[[], Any], expected: int) -> Any:
        self._turns.mine()
        try:
            return super()._one(step, expected)
        except Handed:
            return self._handed_over(1)
        finally:
            self._keep_hollow()

    def _together(self, cut: list[tuple[Any, int]], step: Callable[[Any], Any], expected: int) -> Any:
        self._turns.mine()
        try:
            return super()._together(cut, step, expected)
        finally:
            self._keep_hollow()

    def _keep_hollow(self) -> None:
        """Its forward was another one for a while."""
        if self.hollow:
            self._hollow.let_go(self._elsewhere)

    def _handed_over(self, count: int) -> Tensor:
        self._handed = count
        return torch.zeros((), device=self.module.device, requires_grad=True)

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any], expected: int) -> Any:
        step_checks.check_call(self.found, inputs, named, again=self._output is not None)
        outputs = self._forward_all([self.found.given(inputs, named)], expected)
        if outputs is None:
            raise Handed
        self._output = step_checks.held(outputs[0])
        return outputs[0]

    def _enter(self, xs: list[Any], expected: int) -> list[Any] | None:
        if follow := self._hollow.modes():
            with self.quiet():
                follow()
        outputs = super()._enter(xs, expected)
        if not self.hollow:
            self._hollow.check()
            self._empty()
        return outputs if self.first else None

    def backward(self) -> None:
        if self.first:
            super().backward()
        elif self._handed and self.pipe is not None:
            count, self._handed = self._handed, 0
            with self._at_work():
                self.pipe.backward_many([None] * count)

    def _forget(self) -> None:
        raise RuntimeError(
            "the backward of a micro-batch was skipped on rank 0, but the other ranks have gone on with it; with "
            "several devices every micro-batch goes backward: multiply its loss by zero instead"
        )

    def step(self) -> None:
        if self.pipe is not None:
            with self._at_work():
                self.pipe.step()

    def clip(self, norm: float | None, value: float | None) -> None:
        if self._clip != (norm, value):
            self._clip = norm, value
            super().clip(norm, value)

    # -- the user's module ---------------------------------------------------------------------------------------

    def _elsewhere(self, *inputs: Any, **named: Any) -> Any:
        """What the hollow module does where no F is asked for."""
        assert self.pipe is not None
        self._hollow.check_call(inputs, named, after=self._output is not None)
        with self._at_work():
            return _to(self.module.device, self.pipe.evaluate(self.found.given(inputs, named)))

    def _empty(self) -> None:
        self._hollow.let_go(self._elsewhere)
        self.twins.collect()

    def _fill(self, to: int | None) -> None:
        """Give the module its values: on the rank `to`, or on all."""
        with self.shown():
            mine = self._hollow.values()
        parts = self.meeting.gather("the weights of all stages", mine, to)
        if parts:
            values = {name: value for part in parts for name, value in part.items()}
            self._hollow.fill(values, self.module.device)

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        if not self.lost:
            self.drain()

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: the others are told, and there is nothing left to share."""
        self.failed = True
        if self.pipe is not None:
            self.pipe.ranks.failed(error)

    def leave(self) -> None:
        """The module is whole again on every rank, the optimizer's state on rank 0; the pipeline ends."""
        if self.left or self.pipe is None:
            return
        if not self.lost:
            self._end, states = self._in_flight(), self._optimizer_states()
            if self.hollow:
                self._fill(to=None)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            for n, found in states.items():
                self.optimizer.state[parameters[n]] = found
            self.meeting.gather("the end of fit")
            self.left = True
        self._hollow.restore()
        self.meeting.health, self.meeting.rest = None, nullcontext
        self._turns.mine(False)
        self.pipe.close()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        return not self.left and (self.failed or super().lost)

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self.quiet():
            if self.lost or not self.hollow:
                yield
                return
            self._fill(to=0)
            try:
                yield
            finally:
                self._empty()

    def optimizer_state(self) -> dict[str, Any]:
        found = self.optimizer.state_dict()
        states = found["state"] if self.left else self._optimizer_states()
        return {**found, "state": {n: s for n, s in states.items() if s}}

    def _optimizer_states(self) -> dict[int, Any]:
        """By parameter, in the order of a single device; on rank 0."""
        with self.shown():
            mine = self.twins.state_dict()["state"]
            parts = self.meeting.gather("the optimizer's state", _to("cpu", mine), 0)
        every = {n: found for part in parts for n, found in part.items()}
        return {n: every[n] for n in self.optimizer.state_dict()["state"] if n in every}

    def _in_flight(self) -> dict[str, Any]:
        assert self.pipe is not None
        if self._end is not None:
            return self._end
        with self._at_work():
            mine, plain = self.pipe.share(), self.pipe.plain()
        mine = mine._replace(parts=[part._replace(tensors=without(self.left_out, part.tensors)) for part in mine.parts])
        shares = self.meeting.gather("the micro-batches in flight", mine, 0)
        return pipeline_state.merge(shares[::-1], plain) if shares else {}

    def _fresh(self) -> dict[str, Any]:
        assert self.pipe is not None
        return pipeline_state.merge([self.pipe.share()], self.pipe.plain())

    def _take_up(self, section: dict[str, Any] | None) -> None:
        super()._take_up(section)
        if section is not None and section["state"]["plain"]["loops"]:
            self._empty()


def _to(device: Any, value: Any) -> Any:
    """Every tensor in a structure, on that device."""
    return pytree.tree_map(lambda part: part.to(device) if isinstance(part, Tensor) else part, value)
