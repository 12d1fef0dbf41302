"""Micro-batches: turn a push into micro-batches for the first stage, and outputs into what the model returns.

For a sequence, tensors simply go in and come out. A model whose forward is traced takes any structure; it is traced
once more for a micro-batch of a form, or on a branch, that its stages do not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from pipeback.methods.base import Method
from pipeback.pipeline.input_gradients import check_unwanted
from pipeback.pipeline.option_checks import check_tensors, micro_batches, shares
from pipeback.pipeline.slices import Slices, apart
from pipeback.runtime.loop import Batch
from pipeback.schedules.timeline import in_flight
from pipeback.splitting.attribute_reads import way_of
from pipeback.splitting.traced_model import TracedModel
from pipeback.stages.flight import Value
from pipeback.stages.stage import Stage
from pipeback.tensors.batches import flat
from pipeback.tensors.structures import Form

Wait = Callable[[], object]  # quiesces: buffers are borrowed and put back


class MicroBatcher:
    """Makes micro-batches for the stages of all replicas in this process, `everywhere`.

    method: says how many of a push may be in flight when it returns; None: all may be, since other threads run them, or
    their loss is computed outside.
    """

    def __init__(
        self, program: TracedModel | None, everywhere: Sequence[Sequence[Stage]], method: Method | None
    ) -> None:
        self._program, self._everywhere, self._method = program, everywhere, method
        self._setting = 0  # of the stages, when micro-batches were let in last

    def batches(self, x: Any, y: Any, size: int | None, wait: Wait) -> Sequence[Batch]:
        """The micro-batches of (x, y), cut along the first dimension: all of one replica before those of the next."""
        x, form = self._opened(x)
        check_unwanted(x)
        found = apart(shares(x, y, size, len(self._everywhere)), self._staying)
        if isinstance(found, Slices) and (self._program is None or form is None):
            return found  # which are cut when they are taken
        known = self._known([x for x, _, _ in found], form, wait, None)
        return [(x, flat(y), size) for x, (_, y, size) in zip(known, found, strict=True)]

    @property
    def joins(self) -> bool:
        """Whether inputs of several micro-batches may come as one tensor, which is cut again."""
        return self._program is None and len(self._everywhere) == 1

    @cached_property
    def _staying(self) -> int | None:
        """The most micro-batches of a push that may be in flight when it returns; None: all."""
        if self._method is None:
            return None
        flying = in_flight(self._method.schedule, len(self._everywhere[0]))
        return 0 if self._method.flush_each_push else 2 * max(flying)

    def enter(self, x: Any, wait: Wait, training: bool | None = None) -> Value:
        """One micro-batch. training: whether it will be trained on; None: as the model is set."""
        x, form = self._opened(x)
        if x is not None:  # as other ranks than the first may give
            check_tensors(x, "evaluate" if training is False else "run")
        return self._known([x], form, wait, training)[0]

    def held_out(self, x: Any, y: Any, size: int | None, wait: Wait) -> list[Batch]:
        """Batches of at most `size` samples that are evaluated, not trained on; None: one batch."""
        x, form = self._opened(x)
        found = micro_batches(x, y, size, "evaluate")
        known = self._known([x for x, _, _ in found], form, wait, False)
        return [(x, y, size) for x, (_, y, size) in zip(known, found, strict=True)]

    def leave(self, output: Value, x: Value, training: bool | None = None) -> Any:
        """The output as the model's forward returns it, for x from `enter`."""
        if self._program is None or output is None:
            return output
        return self._program.leave(output, x, training)

    def evaluated(self) -> None:
        """Set stages back to how they were when micro-batches were let in."""
        if self._program is not None:
            self._program.set(self._setting)

    def _opened(self, x: Any) -> tuple[Value, Form | None]:
        return (x, None) if self._program is None else self._program.enter(x)

    def _known(self, xs: Sequence[Value], form: Form | None, wait: Wait, training: bool | None) -> list[Value]:
        """Make sure that the stages know these micro-batches' form; returns them as the first stage takes them."""
        if self._program is None or form is None:
            return list(xs)
        if self._program.ownership.copies.due:
            wait()
            self._program.ownership.copies.follow()
        found, mode = [], self._program.model.training
        for x in xs:
            known = self._program.known(x, form, training)
            if known is None:
                wait()
                known = self._program.prepare(x, form, training)
            found.append(known)
        if self._program.segments[0].__setting__ != (now := self._program.held.number(way_of(training))):
            wait()
            self._program.set(now)
        if training is None:
            self._setting = self._program.segments[0].__setting__
        if training is None and self._everywhere[0][0].module.training != mode:
            wait()
            for stages in self._everywhere:
                for stage in stages:
                    stage.module.training = mode
        return found
