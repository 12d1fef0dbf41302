"""Pipeline: THE loop. Micro-batches come in, the order says what may run, the workers run it."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeback import methods, snapshot
from pipeback.inputs import (
    check_choices,
    check_functions,
    check_groups,
    check_numbers,
    check_optimizer,
    check_outside,
    checked_factory,
    micro_batches,
)
from pipeback.joint import Options, plain_groups, restored
from pipeback.ledger import Record
from pipeback.link import Channels, LocalLink, ThreadLink
from pipeback.method import Method
from pipeback.order import Order
from pipeback.partition import balance, split
from pipeback.rehearsal import rehearse, rehearse_shape
from pipeback.runtime import Batch, Inline, Loop, Messages, Runtime, Threads
from pipeback.stage import OptimizerFactory, Stage, Value, cut
from pipeback.timeline import in_flight
from pipeback.watch import Watch
from pipeback.worker import Worker

FORMAT = 1  # of state_dict


class Memory(NamedTuple):
    """What training holds, measured."""

    weights: int  # bytes of one copy of the trainable weights
    copies: float  # copies of the weights at the peak, weighted by stage size; 1.0 = the live ones alone
    state: float  # the method's own state, in copies of the weights
    activations: int  # bytes kept for backwards at the peak: one micro-batch's, times those in flight


class Pipeline:
    """Train `model` by pipelined backpropagation.

    model       nn.Sequential or list of modules, one stage each; the modules are trained in place
    loss        (output, target) -> 0-d tensor, the mean over the micro-batch; None: it is computed outside, between
                `forward` and `backward`
    optimizer   parameters -> torch.optim.Optimizer, called once a stage
    method      a name of `pipeback.methods.available()` or a `Method`
    micro_batch_size  samples of a micro-batch, the last of a push may be short; None: what is pushed is one micro-batch
    workers     threads in this process that share the stages by measured time; None: one event loop, no thread
    store       None: weights stay on the device of their module
    clip_norm   largest gradient norm of a stage, applied to the averaged gradient before the method sees it
    clip_value  largest absolute value in the averaged gradient, applied after clip_norm
    weights     "equal": micro-batches weigh equally, short ones too; "samples": by their number of samples
    check_finite  raise when a loss is NaN or infinite, naming micro-batch and stage, before its backward
    weight_functions  what to do when a graph saves a function of the weights (autocast, weight norm, masks), so that a
                method that does not stash runs part of its backward on old weights: "refuse" or "warn"
    order       "grouped", or "upstream", "sticky", "random": other orders with the same weights
    seed        of order="random"

    Raises ValueError or TypeError, naming stage or option and the cure, before anything is trained.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer: OptimizerFactory,
        method: str | Method = "cerebras",
        micro_batch_size: int | None = None,
        workers: int | None = None,
        store: None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        weights: Literal["equal", "samples"] = "equal",
        check_finite: bool = False,
        weight_functions: Literal["refuse", "warn"] = "refuse",
        order: str = "grouped",
        seed: int = 0,
    ) -> None:
        parts = split(model)
        self.method = methods.create(method) if isinstance(method, str) else method
        check_functions(self.method, loss, optimizer)
        check_numbers(
            len(parts),
            micro_batch_size=micro_batch_size, workers=workers, clip_norm=clip_norm, clip_value=clip_value,
        )  # fmt: skip
        if loss is None:
            check_outside(
                workers=workers, micro_batch_size=micro_batch_size, weights=weights, check_finite=check_finite
            )
        check_choices(store, weights=weights, weight_functions=weight_functions, order=order)
        self._model = model if isinstance(model, nn.Module) else nn.Sequential(*(part.module for part in parts))
        self._micro_batch_size, self._weights, self._order, self._seed = micro_batch_size, weights, order, seed
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._check_finite, self._workers = check_finite, workers
        self._outside = loss is None
        self._watch: Watch | None = None
        n = len(parts)
        self.method.check_stages(n)
        self.delays: list[int] = self.method.delays(n)
        """Staleness D of every stage: own updates between reading the weights of F(i) and B(i), counted."""
        self._stages = [
            Stage(
                s, n, part.module, part.name, self.method, checked_factory(optimizer, s), loss if s == n - 1 else None
            )
            for s, part in enumerate(parts)
        ]
        for stage in self._stages:
            stage.seed = torch.initial_seed()
            check_optimizer(stage, self.method)
            with torch.no_grad():
                stage.state = self.method.init(stage.weights)
        if not any(stage.weights for stage in self._stages):
            raise ValueError("the model has no trainable parameters; set requires_grad before building the pipeline")
        self.optimizers: list[torch.optim.Optimizer] = [stage.optimizer for stage in self._stages]
        """One a stage; set rates here or attach schedulers. Options are copied when a micro-batch is pushed."""
        self._options = Options(self.optimizers)
        self._arrived = 0
        self._smallest: int | None = None  # the smallest micro-batch rehearsed
        self._seconds: list[float] = [1.0] * n
        self._error: BaseException | None = None
        self._runtime: Runtime | None = None
        self._finalizer: Any = None  # stops the threads of a pipeline that nobody holds
        self._warn = weight_functions == "warn"
        self._modes: list[bool] = []  # training mode of every stage when it was rehearsed
        self._tracing = False
        self._lock = threading.RLock()  # one caller at a time

    # -- training ------------------------------------------------------------------------------------------------

    def push(self, x: Value, y: Any = None) -> Tensor:
        """Train on x and y; returns the mean loss of the micro-batches just pushed, a detached 0-d tensor.

        x: a tensor (N, …) or a tuple of such; y: what `loss` takes as target, cut along the first dimension like x.
        What is in flight stays in flight. With workers the loss is lazy: reading it waits. x and y must stay unchanged
        until their backward is done.
        """
        with self._lock, torch.enable_grad():
            if self._outside:
                raise RuntimeError("push needs a loss, but this pipeline has loss=None; call forward and backward")
            batches = micro_batches(x, y, self._micro_batch_size)
            runtime = self._ready(batches)
            first = self._arrived
            self._arrived += len(batches)
            losses = self._do(partial(runtime.push, first, batches, self._options))
            weigh = self._weights == "samples" and len(batches) > 1
            return losses([size for _, _, size in batches] if weigh else None)

    def forward(self, x: Value, *, expected: int = 1) -> Value:
        """F of one micro-batch x (N, …) at every stage, for a loss that is computed outside (`loss=None`).

        Returns the model's output, cut from its graph and requiring a gradient: compute the loss from it,
        differentiate, and give `backward` the output's gradient; `forget` lets the micro-batch fall instead.
        expected: micro-batches until the next `step`, for methods that flush once a push; more than come is no harm.
        """
        with self._lock, torch.enable_grad():
            self._one_by_one()
            inline = self._ready(micro_batches(x, None, None))
            assert isinstance(inline, Inline)
            output = self._do(partial(inline.forward, x, self._options, expected))
            for part in output if isinstance(output, tuple) else (output,):
                if part.is_floating_point() or part.is_complex():
                    part.requires_grad_()
            return output

    def backward(self, gradient: Value) -> None:
        """B, wherever it may be done now, once the loss's gradient with respect to the output of `forward` is known.

        gradient: shaped like the output (for a tuple, None where the loss does not depend on a part). The updates that
        this makes due come with `step`, the next `forward`, or whatever quiesces the pipeline.
        """
        with self._lock, torch.enable_grad():
            inline = self._went_ahead("backward")
            self._arrived += 1
            self._do(partial(inline.loop.backward, gradient))

    def forget(self) -> None:
        """Let the micro-batch of the last `forward` fall: no stage will see a backward or an update of it."""
        with self._lock:
            self._went_ahead("forget").loop.forget()

    def step(self) -> None:
        """Do the updates that are due. A method that flushes once a push ends its flush here, as after a push."""
        with self._lock, torch.enable_grad():
            self.wait()
            if self._runtime is not None and self.method.flush_each_push:
                self._do(self._runtime.drain)

    def _one_by_one(self) -> None:
        self._open()
        if not self._outside:
            raise RuntimeError("forward is for a pipeline built with loss=None; this one has a loss: call push")
        if isinstance(self._runtime, Inline) and self._runtime.loop.ahead:
            raise RuntimeError("forward was called twice; call backward or forget between")

    def _went_ahead(self, what: str) -> Inline:
        self._open()
        if not isinstance(self._runtime, Inline) or not self._runtime.loop.ahead:
            raise RuntimeError(f"{what} comes after forward, but no micro-batch has gone forward")
        return self._runtime

    def _ready(self, batches: Sequence[Batch]) -> Runtime:
        """Everything checked and the runtime there, before a micro-batch is let in."""
        self._open()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("push trains, which inference mode forbids; call it outside torch.inference_mode()")
        for stage in self._stages:
            stage.check_weight(self._arrived)
        self._rehearse(batches)
        if not self._options.current(self.optimizers):
            for stage in self._stages:
                check_groups(stage)
            self._options = Options(self.optimizers)
        assert self._runtime is not None
        return self._runtime

    def wait(self) -> None:
        """Quiesce: return when everything that data flow and programs allow has been done."""
        with self._lock, torch.enable_grad():
            self._open()
            if self._runtime is not None:
                self._do(self._runtime.wait)

    def drain(self) -> None:
        """Finish what is in flight; what is pushed afterwards fills the pipeline anew."""
        with self._lock, torch.enable_grad():
            self._open()
            if self._runtime is not None:
                self._do(self._runtime.drain)

    def evaluate(self, x: Value) -> Any:
        """The model's output for x (N, …) in evaluation mode on the newest weights, without gradients.

        What is in flight, buffers and the training mode of every module stay as they are.
        """
        with self._lock, torch.no_grad():
            self.wait()
            modes = [(module, module.training) for stage in self._stages for module in stage.module.modules()]
            try:
                for module, _ in modes:
                    module.training = False
                value = x
                for stage in self._stages:
                    _, given = stage.enter(value)
                    if value is x and not stage.clones_input:  # nothing is known of the module before the first push
                        given = tuple(p.clone() for p in given) if isinstance(given, tuple) else given.clone()
                    value = stage.module(given)
            finally:
                for module, mode in modes:
                    module.training = mode
            return cut(value)

    def close(self) -> None:
        """Stop the worker threads, if any; what is in flight is lost."""
        with self._lock:
            self._stop()
            self._error = self._error or RuntimeError("close() was called")

    # -- looking in ----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether an error or `close` has ended it; `load_state_dict` reopens it."""
        return self._error is not None

    @property
    def model(self) -> nn.Module:
        """The user's module with its newest weights (a list is given back as an nn.Sequential of its modules)."""
        self.wait()
        return self._model

    @property
    def ledger(self) -> Sequence[Record]:
        """Records (stage, kind, mb, version) of every F and B; each worker keeps the last million of its own."""
        self.wait()
        return [] if self._runtime is None else self._runtime.ledger()

    def memory(self) -> Memory:
        """Weights, copies, method state and activations; the numbers the memory law compares with the declared ones."""
        self.wait()
        one = sum(stage.bytes() for stage in self._stages)
        held = sum(max(stage.peak_copies, stage.copies()) * stage.bytes() for stage in self._stages)
        state = 0
        for stage in self._stages:
            owned = {id(v) for s in stage.optimizer.state.values() for v in s.values()}
            tensors = [t for v in stage.state.values() if isinstance(v, list) for t in v if t is not None]
            state += sum(t.numel() * t.element_size() for t in tensors if id(t) not in owned)
        activations = sum(stage.activation_bytes * stage.peak_flights for stage in self._stages)
        return Memory(one, held / one if one else 1.0, state / one if one else 0.0, activations)

    def record(self, on: bool = True) -> None:
        """Measure every operation from now on (same bits, one operation at a time), for `pipeback.draw.trace`."""
        self.wait()
        self._tracing = on
        if self._runtime is not None:
            self._runtime.record(on)

    def watch(self, on: bool = True) -> Watch:
        """Follow micro-batches from now on, at one more copy of the weights: `Watch` says what it tells."""
        if self._workers is not None:
            raise ValueError("workers: watch needs the event loop; use workers=None")
        self.wait()
        watch = self._watch or Watch(len(self._stages))
        self._watch = watch if on else None
        if isinstance(self._runtime, Inline):
            self._runtime.loop.worker.watch = self._watch
        return watch

    def clip(self, norm: float | None = None, value: float | None = None) -> None:
        """Clip the updates that come otherwise than the pipeline was built to; those that are due are such."""
        check_numbers(len(self._stages), clip_norm=norm, clip_value=value)
        self._clip_norm, self._clip_value = norm, value
        if isinstance(self._runtime, Inline):
            worker = self._runtime.loop.worker
            worker.clip_norm, worker.clip_value = norm, value

    @property
    def recorded(self) -> list[tuple[float, float, int, str, int]]:
        """What `record` measured: (start, end, stage, kind, micro-batch) in seconds, all workers on one clock."""
        self.wait()
        return [] if self._runtime is None else self._runtime.recorded()

    @property
    def owner(self) -> list[int]:
        """The worker of each stage."""
        if self._workers is None:
            return [0] * len(self._stages)
        return balance(self._seconds, self._workers) if self._runtime is None else self._runtime.owner

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, micro-batches in flight included: {"format", "stages": tensors a stage, "plain": JSON values}.

        Copies, so that later pushes do not change it. Loads with `torch.load(weights_only=True)`; the same layout for
        every runtime. Training on from it gives the same bits.
        """
        with self._lock:
            self.wait()
            if isinstance(self._runtime, Inline) and self._runtime.loop.ahead:
                raise RuntimeError("a micro-batch has gone forward; call backward or forget before taking the state")
            return self._state()

    def _state(self) -> dict[str, Any]:
        numbers: dict[int, int] = {}
        groups: list[Any] = []

        def number(options: Options) -> int:
            if id(options) not in numbers:
                numbers[id(options)] = len(groups)
                groups.append([plain_groups(g) for g in options.groups])
            return numbers[id(options)]

        waiting = {} if self._runtime is None else self._runtime.waiting()
        tensors, plain = [], []
        for stage in self._stages:
            mine = {name: m for name, m in waiting.items() if name[1] == stage.index}
            t, p = snapshot.save(stage, mine, number)
            tensors.append(t)
            plain.append(p)
        current = number(Options(self.optimizers))
        return {
            "format": FORMAT,
            "stages": tensors,
            "plain": {
                "method": type(self.method).__name__,
                "method_options": self.method.options(),
                "optimizer": [type(opt).__name__ for opt in self.optimizers],
                "arrived": self._arrived,
                "weights": self._weights,
                "seconds": self._seconds,
                "loop": None if self._runtime is None else self._runtime.progress(number),
                "stages": plain,
                "groups": groups,
                "current": current,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of `state_dict`. Reopens a closed pipeline.

        Raises ValueError before anything changes when method, optimizers, weights or buffers differ; when the rest
        does not fit (the same weights under other layers), the pipeline is closed.
        """
        with self._lock:
            plain = self._fits(state)
            self._stop()
            self._error = None
            self._do(partial(self._take_up, state["stages"], plain))

    def _take_up(self, tensors: list[snapshot.Tensors], plain: dict[str, Any]) -> None:
        for opt, groups in zip(self.optimizers, plain["groups"][plain["current"]], strict=True):
            for group, saved in zip(opt.param_groups, groups, strict=True):
                group.update(restored(saved, group))
        options = [self._options_from(groups) for groups in plain["groups"]]
        messages: Messages = {}
        with torch.enable_grad():
            for stage, mine, p in zip(self._stages, tensors, plain["stages"], strict=True):
                messages.update(snapshot.load(stage, mine, p, options))
        self._options = options[plain["current"]]
        self._arrived, self._smallest, self._seconds = plain["arrived"], None, plain["seconds"]
        if plain["loop"] is not None:
            self._start()
            assert self._runtime is not None
            self._runtime.resume(plain["loop"], messages, options)

    def _fits(self, state: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(state, dict) or "format" not in state or "plain" not in state:
            raise ValueError("this is not a state of Pipeline.state_dict(); load a model's own state into pipe.model")
        if state["format"] != FORMAT:
            raise ValueError(
                f"the state has format {state['format']}, this version of pipeback reads {FORMAT}; update pipeback"
            )
        plain = state["plain"]
        name, options = type(self.method).__name__, self.method.options()
        if (plain["method"], plain["method_options"]) != (name, options):
            raise ValueError(
                f"the state belongs to method {plain['method']} {plain['method_options']}, here runs {name} {options}; "
                "build the pipeline with the method of the state"
            )
        if len(state["stages"]) != len(self._stages):
            raise ValueError(
                f"the state has {len(state['stages'])} stages, here are {len(self._stages)}; it is of another model"
            )
        if plain["weights"] != self._weights:
            raise ValueError(f"the state was trained with weights={plain['weights']!r}, here is {self._weights!r}")
        counts = [len(groups) for groups in plain["groups"][plain["current"]]]
        if counts != [len(opt.param_groups) for opt in self.optimizers]:
            raise ValueError("the optimizers of the state have other parameter groups than those here")
        mine = [type(opt).__name__ for opt in self.optimizers]
        if plain["optimizer"] != mine:
            raise ValueError(
                f"the state belongs to optimizers {sorted(set(plain['optimizer']))}, here are {sorted(set(mine))}"
            )
        for stage, tensors in zip(self._stages, state["stages"], strict=True):
            snapshot.check(stage, tensors)
        return plain

    def _options_from(self, groups: list[list[dict[str, Any]]]) -> Options:
        mine = [
            [restored(saved, group) for saved, group in zip(some, opt.param_groups, strict=True)]
            for some, opt in zip(groups, self.optimizers, strict=True)
        ]
        return Options(self.optimizers, mine)

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the pipeline is closed: {self._error}; load_state_dict() reopens it") from self._error

    def _do(self, what: Callable[[], Any]) -> Any:
        """Do it; whatever it raises closes the pipeline, for a wave may be half done."""
        try:
            return what()
        except BaseException as error:
            self._error = error
            raise

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def _rehearse(self, batches: Sequence[Batch]) -> None:
        if self._workers is not None and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            raise ValueError("workers: autocast does not reach other threads; enter it inside the modules")
        modes = [stage.module.training for stage in self._stages]
        x, y, size = min(batches, key=lambda batch: batch[2])
        known = self._smallest is not None and modes == self._modes
        if known and self._smallest is not None and size >= self._smallest:
            return
        if self._runtime is not None:
            self._do(self._runtime.wait)  # buffers and random state are borrowed and put back
        if not known:
            first = batches[0]
            self._seconds = rehearse(self._stages, self.method, self.delays, first[0], first[1], warn=self._warn)
        if not known or size < batches[0][2]:
            rehearse_shape(self._stages, x, y)
        if self._runtime is None:
            self._start()
        self._modes = modes
        self._smallest = size if self._smallest is None else min(size, self._smallest)

    def _start(self) -> None:
        """Build the runtime: one loop here, or one loop a thread."""
        stages = self._stages

        def loop(mine: Sequence[Stage], link: Any) -> Loop:
            worker = Worker(
                mine, self.method, self.delays, link,
                clip_norm=self._clip_norm, clip_value=self._clip_value,
                samples=self._weights == "samples", check_finite=self._check_finite,
            )  # fmt: skip
            order = Order(self.method.schedule, len(stages), policy=self._order, seed=self._seed)
            return Loop(worker, order, self.method)

        if self._workers is None:
            self._runtime = Inline(loop(stages, LocalLink()))
            self._runtime.loop.worker.watch = self._watch
        else:
            owner = balance(self._seconds, self._workers)
            threads, cores = torch.get_num_threads(), os.cpu_count() or 1
            if self._workers * threads > max(cores, self._workers):
                warnings.warn(
                    f"{self._workers} workers with {threads} threads each share {cores} cores; "
                    "call torch.set_num_threads(1) before training",
                    stacklevel=4,
                )
            channels = Channels(owner, 2 * max(in_flight(self.method.schedule, len(stages))) + 2)
            loops = [
                loop([s for s in stages if owner[s.index] == w], ThreadLink(w, channels)) for w in range(self._workers)
            ]
            self._runtime = Threads(loops, channels)
            self._finalizer = weakref.finalize(self, self._runtime.close)
        self._runtime.record(self._tracing)
