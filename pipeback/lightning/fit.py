"""One `fit` and its pipeline, which runs F (forward), B (backward) and U (update) when Lightning calls its hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning import find_stages, micro_batches, slice_by_slice, step_checks
from pipeback.lightning.ahead import StagesAhead
from pipeback.lightning.call_override import by_itself
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.fit_rank import Rank
from pipeback.lightning.followed_step import Given
from pipeback.lightning.stage_optimizers import StageOptimizers
from pipeback.lightning.step_clipping import StepClipping
from pipeback.lightning.step_hooks import StepHooks
from pipeback.lightning.strategy_options import StrategyOptions
from pipeback.lightning.streamed_model import StreamedModel
from pipeback.lightning.suspended_slices import LOOKS, Slice
from pipeback.lightning.update_interval import UpdateInterval
from pipeback.lightning.update_size import UpdateSize
from pipeback.pipeline.given_gradients import nothing
from pipeback.pipeline.loss_watch import LossWatch
from pipeback.pipeline.method_choice import by_optimizer
from pipeback.pipeline.pipeline import Pipeline
from pipeback.runtime.runners import Judge
from pipeback.schedules.programs import flush
from pipeback.splitting.traced_model import TracedModel
from pipeback.streaming.store import Store


class Handed(BaseException):
    """Ends `training_step` on ranks without the loss, once F has begun. `except Exception` does not catch it."""


class Later(NamedTuple):
    """The state that a pipeline loads once the first call of the model has built it; section None: none."""

    section: dict[str, Any] | None
    take_up: Callable[[], None]


class Fit:
    """The stages of a LightningModule, the pipeline over them, and the work that is unfinished between two hooks.

    store: where the weights live. visits: serves calls of the model that ask for no F. tell: shows the plan.
    apart: why stages run one by one, whatever was asked for.
    """

    def __init__(
        self,
        rank: Rank,
        module: LightningModule,
        found: TrainedModule,
        optimizer: torch.optim.Optimizer,
        options: StrategyOptions,
        store: Store | None = None,
        visits: StreamedModel | None = None,
        tell: Callable[[str], None] | None = None,
        apart: str | None = None,
    ) -> None:
        self.rank, self.module, self.found, self.optimizer, self.options = rank, module, found, optimizer, options
        self.size = UpdateSize(options.reference_batch, optimizer)
        self._losses = LossWatch(options.debug.stop_at_nan, "batch")
        self.interval = UpdateInterval(options.method or by_optimizer(optimizer), self._updates)
        self.store, self.visits = store, visits
        self._tell = tell  # shows the plan, before the first micro-batch
        self.pipe: Pipeline | None = None
        self.later: Later | None = None  # what the pipeline loads once the first call has built it
        self.twins: StageOptimizers
        self.update = (1, 1)  # batches per update and micro-batches per batch that the pipeline was built for
        self.busy = 0.0  # seconds in F, B and U
        self.loss: Tensor | None = None  # what training_step returned for the last slice
        self.hooks = StepHooks(module, optimizer, rank.elsewhere(store))
        self.clipping = StepClipping(rank, module.trainer)
        self.averaged = False  # whether a callback has replaced the weights that micro-batches in flight have used
        self._output: Any = None  # the model's, cut from its graph; its gradient goes to the last stage
        self._outputs: list[Any] = []  # the same of slices whose F ran together
        self._handed = 0  # micro-batches that wait for B, on ranks without the loss
        followed = found.followed
        self._compare = not followed and not isinstance(found.module, nn.Sequential)  # whether with module.forward
        self._follow_loss = True  # whether to check what the loss depends on: once per batch
        self._own = found.module.__dict__.get("forward") if visits is None else visits.own  # set by the user
        self._dtype = torch.get_default_dtype()  # outside of training_step
        self._due = (1, 1)  # batches per update, and micro-batches of this batch
        self._why_apart = apart
        self.vectorize = options.vectorize if apart is None else False
        self.ahead = StagesAhead(self)
        self._program: TracedModel | None = None  # of a module whose forward is traced
        if self.interval.known:
            batches = module.trainer.accumulate_grad_batches
            self.interval.method(batches, 1)  # refuses what does not fit before anything is trained
            if not followed and not self.options.counts:
                self.build(batches, 1)

    @property
    def vectorized(self) -> dict[str, str]:
        """Which stages run as one, and why others do not."""
        if self._why_apart is not None:
            return {"all stages": f"stage by stage: {self._why_apart}"}
        return {} if self.pipe is None else {**self.pipe.vectorized, **self.ahead.captured.told}

    def settings(self) -> int:
        """A number for the values that the forward of the model reads, which differs if they do."""
        return 0 if self._program is None else self._program.held.number()

    def _updates(self) -> int | None:
        steps = self.module.trainer.estimated_stepping_batches
        return int(steps) if 0 < steps < float("inf") else None

    def build(self, batches: int, per_batch: int, example: Any = None) -> None:
        """Build the pipeline for updates of `batches` batches with `per_batch` micro-batches each. example: its first
        input, for a module whose forward is traced.
        """
        method = self.interval.method(batches, per_batch)
        trainer = self.module.trainer
        with by_itself(self.found.module, self._own):
            split = self.rank.split(example)
        self._program = split.program
        trained, stored = self.rank.trained(split), self.store is not None
        self.twins = StageOptimizers(self.optimizer, trained, self.size, self.rank.piece, stored=stored)
        updates = partial(self.interval.updates, method, per_batch)
        given = self.options.of_pipeline(self.store, trainer.strategy.root_device, self.clipping.limits, updates)
        if self.vectorize == "auto" and method.chunks > 1 and (self.rank.several or (self.options.threads or 1) > 1):
            self._why_apart, self.vectorize = f"with {method!r}, every worker has several parts of the model", False
        looks = self.found.step is not None and self.found.step.looks
        if self.vectorize == "auto" and looks and any(method.delays(2)):
            self._why_apart, self.vectorize = f"training_step calls {self.found.shown} without gradients", False
        if self.vectorize == "auto" and self.found.step is not None and self.found.step.operator:
            self._why_apart, self.vectorize = "the first that training_step calls is one of torch.ops", False
        given["vectorize"] = self.vectorize
        inside = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with by_itself(self.found.module, self._own):
                self.pipe = self.rank.pipeline(split, optimizer=self.twins, method=method, **given)
        finally:
            torch.set_default_dtype(inside)
        self.update = (batches, per_batch)
        if self.visits is not None:
            held = [p for part in split.parts for p in part.module.parameters()]
            self.visits.stream(self._present, self._visit, held)

    def _begin(self, example: Any) -> None:
        """Build the pipeline of a module that is called for the first time."""
        later, self.later = self.later, None
        if later is not None and later.section is not None:
            batches, per_batch = later.section["update"]
            self._due = batches, per_batch
        self.build(*self._due, example)
        if later is not None:
            later.take_up()

    def _visit(self, given: Any) -> Any:
        """Run the model without gradients, outside of F."""
        assert self.pipe is not None
        with self.at_work():
            return self.pipe.run(given)

    @contextmanager
    def _present(self, s: int) -> Iterator[None]:
        """Within this context stage `s` has its newest weights where it computes."""
        assert self.pipe is not None
        with self.at_work(), self.pipe.present(s):
            yield

    # -- F -------------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run `training_step` once per micro-batch of a batch; `backward` and `step` run B and U of the last."""
        trainer = self.module.trainer
        self._fall()  # a micro-batch whose backward Lightning has skipped
        self._follow_loss = True
        size = self.options.micro_batch_size
        cut = [(batch, 0)] if size is None else micro_batches.cut(batch, size)
        batches = trainer.accumulate_grad_batches
        if self.pipe is None and not self.found.followed:
            self.build(batches, len(cut))
        self.interval.check(batches)
        self.size.see(self.interval.method(batches, len(cut)), batch, size, batches)
        if self.pipe is not None:
            self.twins.follow(self.pipe, trainer.optimizers)
        self._due = (batches, len(cut))
        expected = len(cut) * batches

        def given(part: Any) -> Given:
            return Given(step, part, rest, named)

        def one(part: Any) -> Any:
            return self._one(given(part), expected)

        if len(cut) == 1:
            output = one(batch)
            self.loss = step_checks.loss_of(output)
        else:
            log = micro_batches.Log()
            self.hooks.begin(log)
            with log.listening(self.module):
                if self.ahead.may_run(len(cut), expected):
                    with self.rank.training_step():
                        output = self.ahead.run(cut, given, one, log, expected)
                else:
                    output = self.many(cut, one, log)
            self.loss = step_checks.loss_of(output)
            if log.losses:  # else another rank has them
                output = step_checks.passed(output, log.losses, [samples for _, samples in cut])
        self._losses.see(trainer.fit_loop.total_batch_idx, step_checks.loss_of(output).detach())
        return output

    def _one(self, given: Given, expected: int) -> Any:
        """Run `training_step` on one micro-batch; F runs where it calls the model."""
        self._output = None

        def forward(*inputs: Any, **named: Any) -> Any:
            return self._forward(inputs, named, expected)

        with self.rank.training_step():
            try:
                with self.found.heard(given, forward, self._look):
                    output = given.run()
            except Handed:
                return self.hand_over(1)
            self.check_output(output, self._output)
            return output

    def many(self, cut: list[Slice], one: Callable[[Any], Any], log: micro_batches.Log) -> Any:
        """Run `training_step` on every slice, and B of all but the last."""
        return slice_by_slice.run(cut, one, self.backward, self.hooks.differentiate, log, self.pipe)

    def _look(self) -> None:
        """Hear that `training_step` calls the model without gradients, and make the updates that are due."""
        if self.pipe is None:
            return
        if self.called and self.pipe.runs_ahead:
            raise ValueError(LOOKS.format(name=self.found.shown))
        if not self.rank.several:  # else the stages serve the call
            self.pipe.wait()

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any], expected: int) -> Any:
        step_checks.check_call(self.found, inputs, named, again=self._output is not None)
        outputs = self.forward_all([self.found.given(inputs, named)], expected)
        if outputs is None:
            raise Handed
        self._output = step_checks.held(outputs[0])
        return outputs[0]

    def forward_all(self, xs: list[Any], expected: int, judge: Judge | None = None) -> list[Any] | None:
        """Run F of these micro-batches and return the outputs; None on ranks that do not compute the loss. judge: as of
        `Pipeline.forward_many`; it runs the user's code.
        """
        self.prepare(xs[0])
        with self.at_work():
            if self._tell is not None and self.pipe is not None:
                self._tell(str(self.pipe.plan(xs[0], expected=expected)))
                self._tell = None
            return self.rank.enter(self, xs, expected, judge)

    def prepare(self, x: Any) -> None:
        """Have a pipeline for micro-batches like this."""
        if self._compare:
            find_stages.check_chain(self.found, x, None if self.visits is None else self.visits.bring)
            self._compare = False
        if self.pipe is None:
            self._begin(x)

    def at_once(self, count: int, expected: int) -> bool:
        """Whether F of so many micro-batches may run before B of the first."""
        if self.later is not None and self.later.section is not None:
            return False  # it may be amid a flush: the first batch goes slice by slice
        if self.pipe is not None:
            return self.pipe.together(count, expected=expected)
        method = self.interval.method(*self._due)
        return not any(method.delays(2)) and count <= flush(method.schedule_at(0, expected))

    def hand_over(self, count: int) -> Tensor:
        """Note that so many micro-batches wait for B; return a zero for the loss, which another rank computes."""
        self._handed = count
        return torch.zeros((), device=self.module.device, requires_grad=True)

    def hold(self, outputs: list[Any]) -> None:
        """Note the outputs of the model whose gradients B will take."""
        self._outputs = [step_checks.held(output) for output in outputs]

    @property
    def called(self) -> bool:
        """Whether the model has been called in this `training_step`."""
        return self._output is not None or bool(self._outputs)

    def check_output(self, output: Any, held: Any) -> None:
        """Raise ValueError unless `training_step` has returned a loss that depends on what it held of the output."""
        step_checks.check_output(self.found, output, held)
        if self.found.step is not None:
            self.found.step.check_loss(step_checks.loss_of(output))
        if self._follow_loss:
            step_checks.check_loss(self.found, step_checks.loss_of(output), held)
            self._follow_loss = False

    # -- B and U -------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Run B from the gradient of the model's output; without one, the user's backward skipped the micro-batch."""
        if self._handed and self.pipe is not None:
            count, self._handed = self._handed, 0
            with self.at_work():
                self.pipe.backward_many([None] * count)
            return
        outputs = self._outputs or ([] if self._output is None else [self._output])
        self._output, self._outputs = None, []
        if not outputs or self.pipe is None:
            return
        gradients = [step_checks.gradients(out) for out in outputs]
        if len(outputs) == 1 and nothing(gradients[0]):
            self.rank.forget(self.pipe)
            return
        with self.at_work():
            self.pipe.backward_many(gradients)

    def before_backward(self, divided: Tensor) -> Tensor:
        """Return the loss not divided by accumulate_grad_batches: the pipeline divides sums once, by the true count."""
        self.interval.backward_begins(self.module.trainer)
        loss, self.loss = self.loss, None
        return divided if loss is None else loss

    def step(self) -> None:
        """Run U of every stage for which it is due; afterwards no parameter has a gradient."""
        self.interval.step_done()
        if self.pipe is not None:
            with self.at_work():
                self.clipping.begin_step(self.pipe)
                if self.twins.follow_options():
                    self.pipe.renew_options()
                self.pipe.step()

    def _fall(self) -> None:
        if (self._output is not None or self._outputs) and self.pipe is not None:
            self._output, self._outputs = None, []
            self.rank.forget(self.pipe)

    def leave_off(self) -> None:
        """Drop a micro-batch whose backward was skipped; where stages as one have gone on behind it, all that is in
        flight is lost, and the pipeline is closed.
        """
        try:
            self._fall()
        except RuntimeError:
            if self.rank.several or self.pipe is None:
                raise
            self.pipe.close()

    def clip(self, norm: float | None, value: float | None) -> None:
        """Clip the gradient of every stage, for the step that comes."""
        if self.pipe is not None:
            with self.at_work():
                self.clipping.ask(self.pipe, norm, value)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within this context the stages run; a module has its own forward, for it may be traced for another input."""
        begin = time.perf_counter()
        try:
            lifted = nullcontext() if self.visits is None else self.visits.lifted()
            with by_itself(self.found.module, self._own), lifted:
                yield
        finally:
            self.busy += time.perf_counter() - begin

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within this context, which is one within `at_work`, the user's code runs."""
        begin = time.perf_counter()
        try:
            with self.rank.judging():
                yield
        finally:
            self.busy -= time.perf_counter() - begin

    # -- waiting and draining ------------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait until all work that may be done is done; a micro-batch whose backward was skipped is dropped."""
        if self.pipe is not None and not self.pipe.closed:
            self.leave_off()
        if self.pipe is not None and not self.pipe.closed:
            with self.at_work():
                self.pipe.wait()
        yield

    def drain(self) -> None:
        """Finish all micro-batches in flight."""
        with self.quiet(), self.at_work():
            if self.pipe is not None:
                self.pipe.drain()
