"""What one `fit` does with its pipeline: F, B and U where Lightning calls for them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.lightning import find_stages, micro_batches, step_checks
from pipeback.lightning.call_override import call_instead
from pipeback.lightning.find_stages import TrainedModule
from pipeback.lightning.stage_optimizers import StageOptimizers
from pipeback.lightning.streamed_model import StreamedModel
from pipeback.lightning.suspended_step import Suspended
from pipeback.lightning.update_interval import UpdateInterval
from pipeback.methods.base import Method
from pipeback.pipeline.outside_loss import nothing
from pipeback.pipeline.pipeline import Pipeline
from pipeback.schedules.programs import flush
from pipeback.splitting.split import Split
from pipeback.streaming.store import Store


class Asked(NamedTuple):
    """F of a micro-batch, which a suspended `training_step` waits for."""

    x: Any


class Fit:
    """A LightningModule's stages, the pipeline over them, and what is under way between two hooks.

    store: where the weights live; visits: serves the model meanwhile where no F is asked for. tell: shows the plan.
    """

    def __init__(
        self,
        module: LightningModule,
        found: TrainedModule,
        optimizer: torch.optim.Optimizer,
        interval: UpdateInterval,
        micro_batch_size: int | None,
        check: Callable[[Method], None],
        store: Store | None = None,
        visits: StreamedModel | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.module, self.found, self.optimizer, self.interval = module, found, optimizer, interval
        self.size, self.check = micro_batch_size, check  # of the method, once it is known
        self.store, self.visits, self.more = store, visits, more  # options of the pipeline
        self._tell = tell  # the plan, before the first micro-batch
        self.pipe: Pipeline | None = None
        self.twins: StageOptimizers
        self.update = (1, 1)  # batches an update, and micro-batches a batch, that the pipeline was built for
        self.busy = 0.0  # seconds in F, B and U
        self.loss: Tensor | None = None  # what training_step returned
        self.averaged = False  # a callback has put other weights in: what is in flight belongs to those before
        self._output: Any = None  # of the model, cut from its graph; its gradient goes to the last stage
        self._outputs: list[Any] = []  # likewise, of slices that went forward together
        self._versions: list[int] = []  # of the parameters after the last step
        followed = found.followed
        self._compare = not followed and not isinstance(found.module, nn.Sequential)  # with the module's own forward
        self._follow_loss = True  # to the output, once
        self._own = found.module.__dict__.get("forward") if visits is None else visits.own  # what the user has put in
        self._dtype = torch.get_default_dtype()  # outside of training_step
        self._due = (1, 1)  # batches an update, and micro-batches of this batch
        if interval.known:
            batches = module.trainer.accumulate_grad_batches
            check(interval.method(batches, 1))
            if not followed:
                self.build(batches, 1)

    def build(self, batches: int, per_batch: int, example: Any = None) -> None:
        """The pipeline, for updates of so many batches and so many micro-batches a batch.

        example: what it is given first, for a module whose forward is followed.
        """
        method = self.interval.method(batches, per_batch)
        self.check(method)
        trainer = self.module.trainer
        norm, value = norm_and_value(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        with call_instead(self.found.module, self._own) if self.found.followed else nullcontext():
            split = self._split(example)
        self.twins = StageOptimizers(self.optimizer, self._trained(split))
        streamed = {} if self.store is None else {"store": self.store, "device": trainer.strategy.root_device}
        inside = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            self.pipe = self._pipeline(
                split, optimizer=self.twins, method=method, clip_norm=norm, clip_value=value, **streamed, **self.more
            )
        finally:
            torch.set_default_dtype(inside)
        self.update = (batches, per_batch)
        if self.visits is not None:
            self.visits.stream(self._present, self._visit)

    def _split(self, example: Any) -> Split:
        """The stages that the pipeline gets."""
        return self.found.split or self.found.cut(self.found.module, example)

    def _trained(self, split: Split) -> list[list[nn.Parameter]]:
        """The user's parameters that each stage trains."""
        return [[p for p in part.module.parameters() if p.requires_grad] for part in split.parts]

    def _pipeline(self, split: Split, **options: Any) -> Pipeline:
        return Pipeline(split, loss=None, **options)

    def _begin(self, example: Any) -> None:
        """The pipeline of a module that has just been called first."""
        self.build(*self._due, example)

    def _visit(self, given: Any) -> Any:
        """The model without gradients, outside of F."""
        assert self.pipe is not None
        with self._at_work():
            return self.pipe.run(given)

    @contextmanager
    def _present(self, s: int) -> Iterator[None]:
        """A stage has its newest weights where it computes."""
        assert self.pipe is not None
        with self._at_work(), self.pipe.present(s):
            yield

    # -- F -------------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`training_step` on a batch, once a micro-batch; B and U of the last are left to `backward` and `step`."""
        trainer = self.module.trainer
        self._fall()  # a micro-batch whose backward Lightning has skipped
        cut = [(batch, 0)] if self.size is None else micro_batches.cut(batch, self.size)
        batches = trainer.accumulate_grad_batches
        if self.pipe is None and not self.found.followed:
            self.build(batches, len(cut))
        self.interval.check(batches)
        if self.pipe is not None:
            self.twins.follow()
        self._due = (batches, len(cut))
        expected = len(cut) * batches

        def one(part: Any) -> Any:
            return self._one(lambda: step(part, *rest, **named), expected)

        if len(cut) == 1:
            output = one(batch)
        elif self.store is not None and self._at_once(len(cut), expected):
            output = self._together(cut, lambda part: step(part, *rest, **named), expected)
        else:
            output = self._many(cut, one)
        self.loss = step_checks.loss_of(output)
        return output

    def _one(self, step: Callable[[], Any], expected: int) -> Any:
        """`training_step` on one micro-batch, its F within."""
        model, self._output = self.found.module, None
        original = model.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*inputs, **named)
            return self._forward(inputs, named, expected)

        with call_instead(model, forward):
            output = step()
        self._check_output(output)
        return output

    def _many(self, cut: list[tuple[Any, int]], one: Callable[[Any], Any]) -> Any:
        """`training_step` on every slice, B of all but the last within; logs and the loss are the batch's means."""
        log = micro_batches.Log()
        losses: list[Tensor] = []
        with log.listening(self.module):
            for n, (batch, samples) in enumerate(cut):
                log.samples = samples
                output = one(batch)
                losses.append(step_checks.loss_of(output).detach())
                if n + 1 < len(cut):
                    step_checks.loss_of(output).backward()
                    self.backward()
        return step_checks.passed(output, losses, [samples for _, samples in cut])

    def _together(self, cut: list[tuple[Any, int]], step: Callable[[Any], Any], expected: int) -> Any:
        """`training_step` on every slice as far as its call of the model, F of all, the rest of each; B is left.

        So every stage comes to the device once for all slices. Each `training_step` is suspended where it waits for
        F, so that they run in turns, in the order of the slices.
        """
        model = self.found.module
        original = model.forward
        calls = [Suspended(partial(step, batch)) for batch, _ in cut]
        log, losses, entered = micro_batches.Log(), list[Tensor](), set[Suspended]()
        running = calls[0]

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return running.ask(partial(original, *inputs, **named))  # in the caller's thread
            step_checks.check_call(self.found, inputs, named, again=running in entered)
            entered.add(running)
            return running.ask(Asked(self.found.given(inputs, named)))

        def run(n: int, answer: Any = None) -> bool:
            """Slice n goes on; returns whether it waits for F."""
            nonlocal running
            running, log.samples = calls[n], cut[n][1]
            return running.go_on_to(Asked, answer)

        try:
            with call_instead(model, forward), log.listening(self.module):
                for n, call in enumerate(calls):
                    if not run(n):
                        self._output = None
                        self._check_output(call.result)
                with calls[0].modes.applied():
                    outputs = self._forward_all([call.question.x for call in calls], expected)
                if outputs is None:
                    return self._handed_over(len(calls))
                self._outputs = [step_checks.held(output) for output in outputs]
                for n, call in enumerate(calls):
                    self._output = self._outputs[n]
                    run(n, outputs[n])
                    output = call.result
                    self._check_output(output)
                    losses.append(step_checks.loss_of(output).detach())
                    if n + 1 < len(calls):
                        step_checks.loss_of(output).backward()
        finally:
            self._output = None
            for call in calls:
                call.end()
        return step_checks.passed(output, losses, [samples for _, samples in cut])

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any], expected: int) -> Any:
        step_checks.check_call(self.found, inputs, named, again=self._output is not None)
        outputs = self._forward_all([self.found.given(inputs, named)], expected)
        assert outputs is not None
        self._output = step_checks.held(outputs[0])
        return outputs[0]

    def _forward_all(self, xs: list[Any], expected: int) -> list[Any] | None:
        """F of these micro-batches; None where the loss is another rank's."""
        if self._compare:
            find_stages.check_chain(self.found, xs[0], None if self.visits is None else self.visits.bring)
            self._compare = False
        if self.pipe is None:
            self._begin(xs[0])
        with self._at_work():
            if self._tell is not None and self.pipe is not None:
                self._tell(str(self.pipe.plan(xs[0], expected=expected)))
                self._tell = None
            return self._enter(xs, expected)

    def _at_once(self, count: int, expected: int) -> bool:
        """Whether so many micro-batches may go forward before one goes backward."""
        if self.pipe is not None:
            return self.pipe.together(count, expected=expected)
        method = self.interval.method(*self._due)
        return not any(method.delays(2)) and count <= flush(method.schedule_at(0, expected))

    def _enter(self, xs: list[Any], expected: int) -> list[Any] | None:
        assert self.pipe is not None
        return self.pipe.forward_many(xs, expected=expected)

    def _handed_over(self, count: int) -> Tensor:
        raise NotImplementedError

    def _check_output(self, output: Any) -> None:
        step_checks.check_output(self.found, output, self._output)
        if self._follow_loss:
            step_checks.check_loss(self.found, step_checks.loss_of(output), self._output)
            self._follow_loss = False

    # -- B and U -------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """B, from the gradient of the model's output; without one the user's backward has skipped this micro-batch."""
        outputs = self._outputs or ([] if self._output is None else [self._output])
        self._output, self._outputs = None, []
        if not outputs or self.pipe is None:
            return
        gradients = [tuple(p.grad for p in out) if isinstance(out, tuple) else out.grad for out in outputs]
        if len(outputs) == 1 and nothing(gradients[0]):
            self._forget()
            return
        with self._at_work():
            self.pipe.backward_many(gradients)

    def _forget(self) -> None:
        """The micro-batch that has gone forward gets no backward."""
        assert self.pipe is not None
        self.pipe.forget()

    def before_backward(self) -> Tensor | None:
        """The loss to differentiate, undivided."""
        loss, self.loss = self.loss, None
        return loss

    def step(self) -> None:
        """U wherever it is due; afterwards no parameter has a gradient."""
        if self.pipe is not None:
            with self._at_work():
                self.pipe.step()
            self._versions = [p._version for p in self.found.module.parameters()]

    def _fall(self) -> None:
        if (self._output is not None or self._outputs) and self.pipe is not None:
            self._output, self._outputs = None, []
            self._forget()

    def clip(self, norm: float | None, value: float | None) -> None:
        """What limits the gradient of every stage, from the updates that are due on."""
        if self.pipe is not None:
            with self._at_work():
                self.pipe.clip(norm, value)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The stages have the word; a module that is followed once more, for another form of input, is itself."""
        begin = time.perf_counter()
        try:
            with call_instead(self.found.module, self._own) if self.found.followed else nullcontext():
                yield
        finally:
            self.busy += time.perf_counter() - begin

    # -- quiet moments -------------------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Everything that may be done is; a micro-batch whose backward was skipped is forgotten."""
        if self.pipe is None or self.pipe.closed:
            yield
            return
        self._fall()
        with self._at_work():
            self.pipe.wait()
        yield

    def drain(self) -> None:
        """Finish what is in flight."""
        with self.quiet():
            if self.pipe is not None:
                with self._at_work():
                    self.pipe.drain()

    def end(self) -> None:
        """Drain, unless someone else has written the weights since the last step."""
        if self.pipe is None:
            return
        if not self.averaged and self._versions == [p._version for p in self.found.module.parameters()]:
            self.drain()
            return
        self.averaged = True
        warnings.warn(
            "a callback has put other weights into the model since the last step, as weight averaging does; what was "
            "still in flight was computed on those before and is not applied",
            stacklevel=2,
        )


def norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """What limits the norm, and what the single values, of a stage's gradient."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)
