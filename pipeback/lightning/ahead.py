"""Ahead: runs the stages ahead of `training_step`, which waits for the output of the model meanwhile.

    stages as one     in ticks: a slice goes on when it leaves the last stage, whose B has its gradient in the same tick
    with a store      else, F of all slices of a flush, then the rest of each: a stage comes to the device once for all

F and B are the forward and the backward of a micro-batch, here a slice, at a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from torch import Tensor

from pipeback.lightning import micro_batches, step_checks
from pipeback.lightning.captured_step import CapturedStep
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.followed_step import Given
from pipeback.lightning.step_hooks import StepHooks
from pipeback.lightning.suspended_slices import Slice, SuspendedSlices
from pipeback.pipeline.pipeline import Pipeline
from pipeback.runtime.runners import Judge
from pipeback.streaming.store import Store

Step = Callable[[Any], Any]  # of a slice


class Run(Protocol):
    """The parts of a fit that are needed here."""

    found: TrainedModule
    module: LightningModule
    store: Store | None
    vectorize: bool | str
    pipe: Pipeline | None
    busy: float
    hooks: StepHooks

    def settings(self) -> int: ...
    def prepare(self, x: Any) -> None: ...
    def at_once(self, count: int, expected: int) -> bool: ...
    def at_work(self) -> AbstractContextManager[None]: ...
    def forward_all(self, xs: list[Any], expected: int, judge: Judge | None = None) -> list[Any] | None: ...
    def judging(self) -> AbstractContextManager[None]: ...
    def hold(self, outputs: list[Any]) -> None: ...
    def check_output(self, output: Any, held: Any) -> None: ...
    def hand_over(self, count: int) -> Tensor: ...
    def many(self, cut: list[Slice], one: Step, log: micro_batches.Log) -> Any: ...


class StagesAhead:
    """Runs batches of several slices for `fit`."""

    def __init__(self, fit: Run) -> None:
        self.fit = fit
        self.captured = CapturedStep(fit.found, fit.module)
        self._as_one: bool | None = None  # whether stages run as one; known from the first batch on

    def may_run(self, count: int, expected: int) -> bool:
        """Whether the stages may have so many slices before B of the first. expected: those of an update."""
        if self.fit.vectorize and self._as_one is not False:
            return True
        return self.fit.store is not None and self.fit.at_once(count, expected)

    def run(
        self, cut: list[Slice], given: Callable[[Any], Given], one: Step, log: micro_batches.Log, expected: int
    ) -> Any:
        """Run `training_step`s, and B of all slices but the last in ticks; return the output of the last.

        given: the call of `training_step`. one: runs it and F, where stages turn out not to run as one.
        """
        fit = self.fit
        graphs = self.captured.ready(cut, given(cut[0][0])) if self._as_one else None
        slices = SuspendedSlices(fit.found, cut, given, log, fit.settings, graphs)
        try:
            with slices.heard():
                slices.begin(0)
            if graphs and not self.captured.begins(graphs, cut[0][0], slices.calls[0].question):
                slices.leave_to_themselves()
            ticks = self._ticks(slices, expected)  # which may take up a state, and the weights out of the module
            if ticks and fit.pipe is not None and not fit.pipe.together(len(cut), expected=expected):
                slices.run_ahead()
            if not ticks and (fit.store is None or not fit.at_once(len(cut), expected)):
                return self._apart(slices, one, expected)
            with slices.heard():
                slices.begin_all()
            return self._by_ticks(slices, given, expected) if ticks else self._by_stages(slices, expected)
        finally:
            slices.end()

    def _ticks(self, slices: SuspendedSlices, expected: int) -> bool:
        if self._as_one is None and self.fit.vectorize:
            fit, xs = self.fit, slices.asked * len(slices.cut)
            with slices.modes.applied():
                fit.prepare(xs[0])
                assert fit.pipe is not None
                with fit.at_work():
                    self._as_one = fit.pipe.runs_ticks(xs, expected=expected)
        return bool(self._as_one)

    def _by_stages(self, slices: SuspendedSlices, expected: int) -> Any:
        with slices.modes.applied():
            outputs = self.fit.forward_all(slices.asked, expected)
        if outputs is None:
            return self.fit.hand_over(len(slices.cut))
        self.fit.hold(outputs)
        for n, output in enumerate(outputs):
            returned = self._finished(slices, n, output)
        return returned

    def _by_ticks(self, slices: SuspendedSlices, given: Callable[[Any], Given], expected: int) -> Any:
        fit, losses = self.fit, slices.log.losses

        def known(n: int, output: Any) -> Any:
            if (found := slices.judged(n, output)) is None:
                return None
            losses.append(found[0])
            return found[1]

        def asked(n: int, output: Any) -> Any:
            stands = None if n else slices.graphs
            said: list[micro_batches.Said] | None = [] if self.captured.learns or stands else None
            slices.log.listed = said
            with fit.judging():
                self._finished(slices, n, output)
            batch = slices.cut[n][0]
            if said is not None and self.captured.learns:
                question = slices.calls[n].question
                self.captured.learn(given(batch), slices.outside, question, output, losses[-1], said)
            elif said is not None and stands and not self.captured.ends(stands, batch, output, losses[-1], said):
                slices.leave_to_themselves()
            return step_checks.gradients(step_checks.held(output))

        with slices.modes.applied():
            outputs = fit.forward_all(slices.asked, expected, Judge(known, asked))
        if outputs is None:
            return fit.hand_over(1)
        (output,) = outputs
        fit.hold([output])
        return self._finished(slices, len(slices.cut) - 1, output)

    def _finished(self, slices: SuspendedSlices, n: int, output: Any) -> Any:
        """Let a slice come to its end, and all but the last go backward as far as the output of the model."""
        with slices.heard():
            returned = slices.finish(n, output)
        self.fit.check_output(returned, step_checks.held(output))
        loss = step_checks.loss_of(returned)
        slices.log.losses.append(loss.detach())
        if n + 1 < len(slices.cut):
            self.fit.hooks.differentiate(loss)
        return returned

    def _apart(self, slices: SuspendedSlices, one: Step, expected: int) -> Any:
        """Run a batch slice by slice, whose first `training_step` is suspended already."""
        begun = [slices]

        def each(batch: Any) -> Any:
            if not begun:
                return one(batch)
            slices = begun.pop()
            with slices.modes.applied():
                outputs = self.fit.forward_all(slices.asked, expected)
            if outputs is None:
                return self.fit.hand_over(1)
            (output,) = outputs
            self.fit.hold([output])
            with slices.heard():
                returned = slices.finish(0, output)
            self.fit.check_output(returned, step_checks.held(output))
            return returned

        return self.fit.many(slices.cut, each, slices.log)
