"""What one `fit` does with its pipeline: F, B and U where Lightning calls for them."""

from __future__ import annotations

import copy
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

from pipeback import meta
from pipeback.ahead import nothing
from pipeback.disk import DiskStore
from pipeback.ladder import Split
from pipeback.lightning import body, private, randomness, slices, steps
from pipeback.lightning.body import Body
from pipeback.lightning.instead import instead
from pipeback.lightning.interval import Interval
from pipeback.lightning.suspended import Suspended
from pipeback.lightning.twins import Twins
from pipeback.lightning.visits import Visits
from pipeback.method import Method
from pipeback.pipeline import Pipeline
from pipeback.schedules import flush
from pipeback.store import Store

KEPT = ("weight/", "buffer/", "optimizer/")  # what a checkpoint holds anyway: the model's state and the optimizer's


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
        found: Body,
        optimizer: torch.optim.Optimizer,
        interval: Interval,
        micro_batch_size: int | None,
        check: Callable[[Method], None],
        store: Store | None = None,
        visits: Visits | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.module, self.found, self.optimizer, self.interval = module, found, optimizer, interval
        self.size, self.check = micro_batch_size, check  # of the method, once it is known
        self.store, self.visits, self.more = store, visits, more  # options of the pipeline
        self._tell = tell  # the plan, before the first micro-batch
        self.pipe: Pipeline | None = None
        self.twins: Twins
        self.update = (1, 1)  # batches an update, and micro-batches a batch, that the pipeline was built for
        self.busy = 0.0  # seconds in F, B and U
        self.loss: Tensor | None = None  # what training_step returned
        self.averaged = False  # a callback has put other weights in: what is in flight belongs to those before
        self.left = False  # the pipeline has ended, and its weights are in the module again
        self._output: Any = None  # of the model, cut from its graph; its gradient goes to the last stage
        self._outputs: list[Any] = []  # likewise, of slices that went forward together
        self._end: dict[str, Any] | None = None  # the state of the pipeline at the end of the fit
        self._versions: list[int] = []  # of the parameters after the last step
        followed = found.followed
        self._compare = not followed and not isinstance(found.module, nn.Sequential)  # with the module's own forward
        self._absent = meta.absent(found.module)  # at first: it may be larger than memory
        self._follow_loss = True  # to the output, once
        self._own = found.module.__dict__.get("forward") if visits is None else visits.own  # what the user has put in
        self._dtype = torch.get_default_dtype()  # outside of training_step
        self._due = (1, 1)  # batches an update, and micro-batches of this batch
        self._kept: dict[str, Any] | None = None
        self._loaded = False  # from a checkpoint, for a pipeline that comes with the first call
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
        with instead(self.found.module, self._own) if self.found.followed else nullcontext():
            split = self._split(example)
        self.twins = Twins(self.optimizer, self._trained(split))
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
        """The pipeline of a module that has just been called first, and what it goes on from."""
        section, self._kept = self._kept, None
        batches, per_batch = self._due if section is None else section["update"]
        self.build(batches, per_batch, example)
        if self._loaded:
            self._take_up(section)

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
        cut = [(batch, 0)] if self.size is None else slices.cut(batch, self.size)
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
        self.loss = steps.loss_of(output)
        return output

    def _one(self, step: Callable[[], Any], expected: int) -> Any:
        """`training_step` on one micro-batch, its F within."""
        model, self._output = self.found.module, None
        original = model.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*inputs, **named)
            return self._forward(inputs, named, expected)

        with instead(model, forward):
            output = step()
        self._check_output(output)
        return output

    def _many(self, cut: list[tuple[Any, int]], one: Callable[[Any], Any]) -> Any:
        """`training_step` on every slice, B of all but the last within; logs and the loss are the batch's means."""
        log = slices.Log()
        losses: list[Tensor] = []
        with log.listening(self.module):
            for n, (batch, samples) in enumerate(cut):
                log.samples = samples
                output = one(batch)
                losses.append(steps.loss_of(output).detach())
                if n + 1 < len(cut):
                    steps.loss_of(output).backward()
                    self.backward()
        return steps.passed(output, losses, [samples for _, samples in cut])

    def _together(self, cut: list[tuple[Any, int]], step: Callable[[Any], Any], expected: int) -> Any:
        """`training_step` on every slice as far as its call of the model, F of all, the rest of each; B is left.

        So every stage comes to the device once for all slices. Each `training_step` is suspended where it waits for
        F, so that they run in turns, in the order of the slices.
        """
        model = self.found.module
        original = model.forward
        calls = [Suspended(partial(step, batch)) for batch, _ in cut]
        log, losses, entered = slices.Log(), list[Tensor](), set[Suspended]()
        running = calls[0]

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return running.ask(partial(original, *inputs, **named))  # in the caller's thread
            steps.check_call(self.found, inputs, named, again=running in entered)
            entered.add(running)
            return running.ask(Asked(self.found.given(inputs, named)))

        def run(n: int, answer: Any = None) -> bool:
            """Slice n goes on; returns whether it waits for F."""
            nonlocal running
            running, log.samples = calls[n], cut[n][1]
            return running.go_on_to(Asked, answer)

        try:
            with instead(model, forward), log.listening(self.module):
                for n, call in enumerate(calls):
                    if not run(n):
                        self._output = None
                        self._check_output(call.result)
                with calls[0].modes.applied():
                    outputs = self._forward_all([call.question.x for call in calls], expected)
                if outputs is None:
                    return self._handed_over(len(calls))
                self._outputs = [steps.held(output) for output in outputs]
                for n, call in enumerate(calls):
                    self._output = self._outputs[n]
                    run(n, outputs[n])
                    output = call.result
                    self._check_output(output)
                    losses.append(steps.loss_of(output).detach())
                    if n + 1 < len(calls):
                        steps.loss_of(output).backward()
        finally:
            self._output = None
            for call in calls:
                call.end()
        return steps.passed(output, losses, [samples for _, samples in cut])

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any], expected: int) -> Any:
        steps.check_call(self.found, inputs, named, again=self._output is not None)
        outputs = self._forward_all([self.found.given(inputs, named)], expected)
        assert outputs is not None
        self._output = steps.held(outputs[0])
        return outputs[0]

    def _forward_all(self, xs: list[Any], expected: int) -> list[Any] | None:
        """F of these micro-batches; None where the loss is another rank's."""
        if self._compare:
            body.check_chain(self.found, xs[0], None if self.visits is None else self.visits.bring)
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
        if self._kept is not None:  # it may stand within a flush: the first batch goes slice by slice
            return False
        method = self.interval.method(*self._due)
        return not any(method.delays(2)) and count <= flush(method.schedule_at(0, expected))

    def _enter(self, xs: list[Any], expected: int) -> list[Any] | None:
        assert self.pipe is not None
        return self.pipe.forward_many(xs, expected=expected)

    def _handed_over(self, count: int) -> Tensor:
        raise NotImplementedError

    def _check_output(self, output: Any) -> None:
        steps.check_output(self.found, output, self._output)
        if self._follow_loss:
            steps.check_loss(self.found, steps.loss_of(output), self._output)
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
            with instead(self.found.module, self._own) if self.found.followed else nullcontext():
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

    def leave(self) -> None:
        """The end of `fit`; it may have failed. What lives in a store is in the module again, in host memory.

        A module that came from the meta device goes back there where its weights are in files: memory may be too small.
        """
        if self.pipe is None or self.store is None or self.left:
            return
        on_disk = isinstance(self.store, DiskStore)
        if on_disk and self._absent:
            self.left = not self.lost
            self.pipe.close()
            self.optimizer.state.clear()
            meta.let_go(self.found.module)
            return
        if on_disk and not self.lost and not self.averaged:
            self._end = self._in_flight()
        try:
            with self.pipe.shown():
                values = [(p, p.data.clone() if on_disk else p.data) for p in self.found.module.parameters()]
                if on_disk:
                    self.twins.detach()
        except Exception as error:
            if not self.lost:
                raise
            warnings.warn(f"the weights in the store could not be read: {error}", stacklevel=2)
            values = []
        self.left = not self.lost
        for p, value in values:
            p.data = value
        if on_disk:
            self.pipe.close()  # others may use its folder

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether a stage has failed, and with it what was in flight."""
        return not self.left and self.pipe is not None and self.pipe.closed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Meanwhile the module has all its weights, on rank 0, which writes checkpoints; and nothing moves."""
        with self.quiet(), self.shown():
            yield

    @contextmanager
    def shown(self, *, changes: bool = False) -> Iterator[None]:
        """Meanwhile what lives in a store is in memory, and can be read, or written with `changes`."""
        if self.store is None or self.pipe is None or self.left:
            yield
            return
        with self._at_work(), self.pipe.shown(changes=changes):
            yield

    def kept(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights that were read while they were shown, as they may be handed on."""
        if self.store is None or self.pipe is None or self.left:
            return values
        # a file of tensors that share memory needs them to be of one type
        if isinstance(self.store, DiskStore) or len({p.dtype for p in self.found.module.parameters()}) > 1:
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        return values

    def optimizer_state(self) -> dict[str, Any]:
        """As if the user's optimizer had made the steps; on rank 0."""
        with self.shown():
            if self.sparse:
                assert self.pipe is not None
                return self.twins.dense_state_dict(self.pipe.expanded)
            found = self.twins.state_dict()
            return copy.deepcopy(found) if isinstance(self.store, DiskStore) else found

    def section(self) -> dict[str, Any]:
        """What a checkpoint lacks: micro-batches in flight, the method's state, random state; on rank 0."""
        now = {"mid_epoch": private.mid_epoch(self.module.trainer), "random": randomness.save()}
        if self._kept is not None:
            return {**self._kept, **now}
        with self.quiet():
            state = self._in_flight()
        return {"update": list(self.update), **now, "state": state}

    @property
    def sections(self) -> bool:
        """Whether there is something that a checkpoint lacks."""
        return self.pipe is not None or self._kept is not None

    def _in_flight(self) -> dict[str, Any]:
        """The state of the pipeline without what a checkpoint holds anyway."""
        assert self.pipe is not None
        if self._end is not None:
            return self._end
        with self._at_work():
            state = self.pipe.state_dict()
        return {**state, "stages": [without(self.left_out, tensors) for tensors in state["stages"]]}

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a section leaves out, since the rest of a checkpoint has it: not sparse weights, which it has dense for
        others than us, nor masters, which it has rounded.
        """
        return () if self.sparse or self.more.get("masters") else KEPT

    @property
    def sparse(self) -> bool:
        """Whether only survivors of the weights are kept."""
        return self.more.get("sparsity") is not None

    def _fresh(self) -> dict[str, Any]:
        """The state of a pipeline that has just been built."""
        assert self.pipe is not None
        return self.pipe.state_dict()

    def load(self, section: dict[str, Any] | None) -> None:
        """Take up a section; weights, buffers and the optimizer's state have been loaded where they live.

        A module that is followed takes it up when it is called first.
        """
        if section is not None:
            randomness.load(section["random"])
        if self.pipe is None and self.found.followed:
            self._loaded, self._kept = True, section
            return
        if self.pipe is None:
            batches = self.module.trainer.accumulate_grad_batches
            self.build(*((batches, 1) if section is None else section["update"]))
        self._take_up(section)

    def _take_up(self, section: dict[str, Any] | None) -> None:
        assert self.pipe is not None
        with self.shown(changes=True):
            self.twins.give(stored=self.store is not None)
        if section is None:
            return
        here, there = self._fresh()["stages"], section["state"]["stages"]
        if len(here) == len(there) and self.left_out:  # if not, load_state_dict says so
            there = [
                {**{k: v for k, v in mine.items() if k.startswith(self.left_out)}, **theirs}
                for mine, theirs in zip(here, there, strict=True)
            ]
        with self._at_work():
            self.pipe.load_state_dict({**section["state"], "stages": there})
        self.twins.take()


def norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """What limits the norm, and what the single values, of a stage's gradient."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)


def without(prefixes: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin otherwise."""
    return {k: v for k, v in tensors.items() if not k.startswith(prefixes)}
