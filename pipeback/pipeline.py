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
from pipeback.joint import Options
from pipeback.ledger import Record
from pipeback.link import Channels, LocalLink, ThreadLink
from pipeback.method import Method
from pipeback.order import POLICIES, Order
from pipeback.partition import balance, split
from pipeback.rehearsal import rehearse, rehearse_shape
from pipeback.runtime import Batch, Inline, Loop, Messages, Runtime, Threads
from pipeback.stage import OptimizerFactory, Stage, Value, cut
from pipeback.timeline import in_flight
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
    loss        (output, target) -> 0-d tensor, the mean over the micro-batch
    optimizer   parameters -> torch.optim.Optimizer, called once a stage
    method      a name of `pipeback.methods.available()` or a `Method`
    micro_batch_size  samples of a micro-batch, the last of a push may be short; None: what is pushed is one micro-batch
    workers     threads in this process that share the stages by measured time; None: one event loop, no thread
    store       None: weights stay on the device of their module
    clip_norm   largest gradient norm of a stage, applied to the averaged gradient before the method sees it
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
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory,
        method: str | Method = "cerebras",
        micro_batch_size: int | None = None,
        workers: int | None = None,
        store: None = None,
        clip_norm: float | None = None,
        weights: Literal["equal", "samples"] = "equal",
        check_finite: bool = False,
        weight_functions: Literal["refuse", "warn"] = "refuse",
        order: str = "grouped",
        seed: int = 0,
    ) -> None:
        parts = split(model)
        self.method = methods.create(method) if isinstance(method, str) else method
        _check_functions(self.method, loss, optimizer)
        _check_numbers(len(parts), micro_batch_size=micro_batch_size, workers=workers, clip_norm=clip_norm)
        _check_choices(store, weights=weights, weight_functions=weight_functions, order=order)
        self._model = model if isinstance(model, nn.Module) else nn.Sequential(*(part.module for part in parts))
        self._micro_batch_size, self._weights, self._order, self._seed = micro_batch_size, weights, order, seed
        self._clip_norm, self._check_finite, self._workers = clip_norm, check_finite, workers
        n = len(parts)
        self.method.check_stages(n)
        self.delays: list[int] = self.method.delays(n)
        """Own updates of each stage between F(i) and B(i), counted on the schedule."""
        self._stages = [
            Stage(s, n, part.module, part.name, self.method, _factory(optimizer, s), loss if s == n - 1 else None)
            for s, part in enumerate(parts)
        ]
        for stage in self._stages:
            stage.seed = torch.initial_seed()
            _check_optimizer(stage, self.method)
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
            self._open()
            if torch.is_inference_mode_enabled():
                raise RuntimeError("push trains, which inference mode forbids; call it outside torch.inference_mode()")
            batches = self._cut(x, y)
            for stage in self._stages:
                stage.check_weight(self._arrived)
            self._rehearse(batches)
            if not self._options.current(self.optimizers):
                for stage in self._stages:
                    _check_groups(stage)
                self._options = Options(self.optimizers)
            assert self._runtime is not None
            first = self._arrived
            self._arrived += len(batches)
            losses = self._do(partial(self._runtime.push, first, batches, self._options))
            weigh = self._weights == "samples" and len(batches) > 1
            return losses([size for _, _, size in batches] if weigh else None)

    def wait(self) -> None:
        """Quiesce: return when everything that data flow and programs allow has been done."""
        with self._lock:
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
            return self._state()

    def _state(self) -> dict[str, Any]:
        numbers: dict[int, int] = {}
        groups: list[Any] = []

        def number(options: Options) -> int:
            if id(options) not in numbers:
                numbers[id(options)] = len(groups)
                groups.append([_plain_groups(g) for g in options.groups])
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
                group.update(_group(saved, group))
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
            [_group(saved, group) for saved, group in zip(some, opt.param_groups, strict=True)]
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

    def _cut(self, x: Value, y: Any) -> list[Batch]:
        """Micro-batches (x, y, samples) of what was pushed."""
        parts = x if isinstance(x, tuple) else (x,)
        if not parts or [part for part in parts if not isinstance(part, Tensor)]:
            raise TypeError(f"push takes a tensor or a tuple of tensors, but got {type(x).__name__}")
        if [part for part in parts if not part.dim()]:
            raise ValueError("push takes batches: the first dimension counts samples, but a 0-d tensor was given")
        y = tuple(map(_target, y)) if isinstance(y, tuple) else _target(y)
        length = len(parts[0])
        if length == 0:
            raise ValueError("the batch that was pushed is empty")
        size = self._micro_batch_size
        if size is None:
            return [(x, y, length)]
        targets = [t for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor) and t.dim()]
        if any(len(part) != length for part in (*parts, *targets)):
            lengths = [len(part) for part in (*parts, *targets)]
            raise ValueError(f"x and y must have one length to be cut into micro-batches of {size}, but have {lengths}")

        def piece(value: Any, begin: int) -> Any:
            if isinstance(value, tuple):
                return tuple(piece(part, begin) for part in value)
            return value[begin : begin + size] if isinstance(value, Tensor) and value.dim() else value

        return [(piece(x, b), piece(y, b), min(size, length - b)) for b in range(0, length, size)]

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
                clip_norm=self._clip_norm, samples=self._weights == "samples", check_finite=self._check_finite,
            )  # fmt: skip
            order = Order(self.method.schedule, len(stages), policy=self._order, seed=self._seed)
            return Loop(worker, order, self.method)

        if self._workers is None:
            self._runtime = Inline(loop(stages, LocalLink()))
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


def _plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.item() if isinstance(v, Tensor) else v for k, v in g.items() if k != "params"} for g in groups]


def _group(saved: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """Options as they were, in the types that this optimizer uses."""
    fixed = {"params": mine["params"]}
    for key, value in saved.items():
        if isinstance(mine.get(key), Tensor):
            value = torch.as_tensor(value, dtype=mine[key].dtype, device=mine[key].device)
        elif isinstance(mine.get(key), tuple):
            value = tuple(value)
        fixed[key] = value
    return fixed


def _factory(optimizer: OptimizerFactory, s: int) -> OptimizerFactory:
    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"stage {s}: optimizer must be a function from parameters to a torch.optim.Optimizer, but returned "
                f"{type(made).__name__}; for example optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        given = {id(p) for p in params}
        found = {id(p) for group in made.param_groups for p in group["params"]}
        if given != found:
            raise ValueError(
                f"stage {s}: the optimizer must take exactly the parameters it is given, once; do not filter them"
            )
        return made

    return build


def _check_optimizer(stage: Stage, method: Method) -> None:
    opt = stage.optimizer
    if isinstance(opt, torch.optim.LBFGS):
        raise ValueError(
            f"{stage.label}: LBFGS evaluates the loss several times a step, a pipeline cannot; use SGD or Adam"
        )
    if stage.weights:
        try:
            method.check(opt, stage.stages)
        except ValueError as error:
            raise ValueError(f"{stage.label}: {error}") from None


def _check_groups(stage: Stage) -> None:
    found = {id(p) for group in stage.optimizer.param_groups for p in group["params"]}
    if stage.weights and found != {id(w) for w in stage.weights}:
        raise ValueError(f"{stage.label}: parameters were added to its optimizer; build a new Pipeline")


def _check_functions(method: Any, loss: Any, optimizer: Any) -> None:
    if not isinstance(method, Method):
        raise TypeError(f"method must be a name or a pipeback.Method, but is {type(method).__name__}")
    if not callable(getattr(method, "schedule", None)):
        raise TypeError(f"method {type(method).__name__} has no schedule; set one, for example flowing(2)")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if not callable(value):
            raise TypeError(f"{name} must be a function, but is {type(value).__name__}")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("loss has weights of its own, which no stage would train; put them into the last stage")


def _check_numbers(stages: int, **options: Any) -> None:
    for name in ("micro_batch_size", "workers"):
        value = options[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1 or None, but is {value!r}")
    if options["workers"] is not None and options["workers"] > stages:
        raise ValueError(
            f"workers={options['workers']} but the model has {stages} stages; use at most one worker a stage"
        )
    clip_norm = options["clip_norm"]
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0 or None, but is {clip_norm!r}")


def _check_choices(store: Any, **options: Any) -> None:
    if store is not None:
        raise ValueError(f"store={store!r}: this version keeps weights on the device of their module; use store=None")
    allowed = {"weights": ("equal", "samples"), "weight_functions": ("refuse", "warn"), "order": POLICIES}
    for name, value in options.items():
        if value not in allowed[name]:
            raise ValueError(f"{name} must be one of {', '.join(allowed[name])}, but is {value!r}")
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise ValueError(
            "a process group of several ranks is initialised, but this version runs in one process; use workers="
        )


def _target(value: Any) -> Any:
    """A part of a target, without the graph that made it, which is not ours to train."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"y must be a tensor, a number, None, or a tuple of these, but has a {type(value).__name__}")
