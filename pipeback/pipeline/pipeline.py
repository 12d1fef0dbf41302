"""Pipeline: THE loop. Micro-batches come in, the order says what may run, the workers run it."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeback import methods, sparsities
from pipeback.checkpoint import commits, pipeline_state
from pipeback.distributed.agreement import agree
from pipeback.distributed.held_stages import HeldStages
from pipeback.distributed.join import default_device, join, layout, wanted
from pipeback.distributed.rank_runner import RankRunner
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.errors import StoreError
from pipeback.methods.base import Method
from pipeback.pipeline import memory_use
from pipeback.pipeline.breakdown import StageRow, breakdown
from pipeback.pipeline.build import StageBuilder
from pipeback.pipeline.closed import closed
from pipeback.pipeline.followers import Followers
from pipeback.pipeline.intact import Intact
from pipeback.pipeline.memory_use import Memory
from pipeback.pipeline.micro_batches import MicroBatcher
from pipeback.pipeline.modes import OTHERWISE, Modes, Turn
from pipeback.pipeline.observers import Observers
from pipeback.pipeline.option_checks import (
    check_functions,
    check_groups,
    check_masters,
    check_numbers,
    check_options,
    check_outside,
    check_skewed,
)
from pipeback.pipeline.outside_loss import OutsideLoss, nothing
from pipeback.pipeline.rehearsals import Rehearsals, smallest
from pipeback.pipeline.start import start
from pipeback.plan.budget import check, check_stages
from pipeback.plan.survey import survey
from pipeback.plan.training_plan import Plan, plan
from pipeback.runtime.ledger import Record
from pipeback.runtime.loop import Batch, Loop, Messages
from pipeback.runtime.runners import EventLoop, Runner, TickLoop
from pipeback.runtime.setting import Setting
from pipeback.runtime.staleness import Watch
from pipeback.runtime.undo import Dropped
from pipeback.schedules.recording import Recording
from pipeback.sparsities.base import Sparsity
from pipeback.splitting.split import Split, split_model
from pipeback.stages.activations import kinds
from pipeback.stages.joint_optimizer import Options, plain_groups
from pipeback.stages.stage import OptimizerFactory, Stage, Value, cut, evaluate
from pipeback.streaming import disk_store, forked
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.shards import share_out
from pipeback.streaming.store import DeviceStore, Store
from pipeback.streaming.streamed_weights import StreamedWeights
from pipeback.streaming.traffic import Traffic, together
from pipeback.tensors import accelerators
from pipeback.vectorized.worker import fitting, stacked
from pipeback.weights import aliases


class Pipeline:
    """Train `model` by pipelined backpropagation.

    model       nn.Sequential or list of modules, one stage each; or any module, whose forward is followed; or a `Split`
                of one. The modules are trained in place
    loss        (output, target) -> 0-d tensor, the mean over the micro-batch; None: it is computed outside, between
                `forward` and `backward`
    optimizer   parameters -> torch.optim.Optimizer, called once a stage
    method      a name of `pipeback.methods.available()` or a `Method`
    micro_batch_size  samples of a micro-batch, the last of a push may be short; None: what is pushed is one micro-batch
    workers     threads in this process that share the stages by measured time; None: one event loop, no thread. Under
                a process group of several ranks, or torchrun, each rank is a worker
    replicas    pipelines on different data that average their gradients at each update: in one process, what is pushed
                is cut into that many equal parts; over processes, every replica's ranks push what is its own
    mesh        over processes: the ranks in the order of the pipeline, or (replicas, workers) of them; None: all
    timeout     seconds after which a rank that does not answer is given up, and every other one raises a `RankError`
    link        how ranks exchange tensors: "auto", "shared_memory", "gloo" or "nccl"
    init        gives a module from the meta device its values: a function of the module, or the path of safetensors
                files with the weights; None: `reset_parameters` of its layers
    device      where stages from the meta device go; None: this rank's accelerator under NCCL, else the CPU. With a
                store, where all stages compute; None: on the device of their module
    store       None: weights stay on the device of their module; "host": weights, gradients and optimizer state live in
                host memory, and a stage's weights come to the device when they are needed; or a `Store`. The stores of
                replicas over processes share the stages: each keeps a slice of every one that its rank computes
    sparsity    a name of `pipeback.sparsities.available()` or a `Sparsity`: most weights are zero, and neither stored,
                sent to the device nor sent back
    skip_zeros  with sparsity: linear layers do not compute the zeros either, by sparse products with other last bits;
                "auto": where that was measured to be faster when the pipeline is built
    clip_norm   largest gradient norm of a stage, applied to the averaged gradient before the method sees it
    clip_value  largest absolute value in the averaged gradient, applied after clip_norm
    weights     "equal": micro-batches weigh equally, short ones too; "samples": by their number of samples
    check_finite  raise when a loss is NaN or infinite, naming micro-batch and stage, before its backward
    weight_functions  what to do when a graph saves a function of the weights that is not cheap to make anew (spectral
                norm), so that a method that does not stash runs part of its backward on old weights: "refuse" or "warn"
    stages      where a model whose forward is followed is cut: "block"; "layer", each layer with weights and what comes
                behind it; "sublayer", norms apart; a number of stages; names of modules where stages begin; "auto":
                blocks, else layers. Of a sequence: "auto", a stage a module, or a number
    example     what one push brings, which such a model is followed with: a tensor, a tuple of positional arguments, or
                a dict of keyword arguments
    leaves      paths of modules that are not looked into
    balance     what a number of stages is balanced by: "time" (work is counted: each call cuts alike) or "memory"
    masters     the optimizer, the method, clipping and averaging work on float32 copies of trainable weights of a half
                type (bfloat16, float16), and F and B run on these, rounded. Else an update smaller than half a unit in
                the last place of a weight is lost. Gradients are summed in the half type. Costs 4 bytes a weight, and
                what optimizer and method keep is float32, too. Write weights in place by torch's functions, which are
                noticed at the next push, not through `.data`. Does not go with a store or sparsity
    compile     run every stage's forward (and so its backward) through torch.compile; or a dict of its options.
                Modules, names, hooks and state_dict stay as they are; evaluation is not compiled. Results differ in
                rounding. The rehearsal compiles; a micro-batch of another shape later on does once more. Where B runs
                on newer weights than F, graphs keep what uncompiled ones keep, which is checked: one that keeps old
                weights is refused, see `weight_functions`
    vectorize   runs of neighbouring stages that are alike (layers or blocks of one shape) run as one, each stage on its
                own micro-batch: at update size one the work of all layers becomes a few large operations. Every method
                works; results differ from those of the event loop in rounding. With compile, the two graphs of a run
                are compiled. Losses are lazy: reading one, like `wait`, first finishes what was pushed. Stages that
                draw random numbers or change buffers, and whatever torch cannot batch, run as they are (on
                micro-batches of the forms where that is so). "auto": where F and B were measured to be faster when the
                first micro-batch came, by enough for the method: at all where ticks of the steady state are one
                function (the flowing methods), else twice, or five times where every second stage is idle at a tick;
                `vectorized` says what became of each run. "cuda_graph": as True, and those ticks, with momentum SGD,
                are captured as a CUDA graph and replayed; needs all stages on a GPU, and has not been tried on one.
                With activations "device" or "recompute"
    activations what a stage keeps of a micro-batch from F to B. "device": all that autograd saves. "host": the same,
                but it waits in host memory, except the stage's input; the same bits. "recompute": the stage's input; B
                does the forward once more, on the weights in force at B. Hooks on modules, and whatever else a forward
                does by the way, then happen twice; buffers change once. A list has one kind a stage, a dict {stage's
                name or number: kind} leaves the rest at "device". What "recompute" does to the gradient, by method:
                sgd, gpipe, one_f_one_b (flush) and pipedream, pipedream_2bw, spectrain's version 2 (stash) have F's
                weights at B, and the same bits. pb, lwp, sc, cerebras, pipemare, spectrain's version 1 (they flow) have
                newer or others, so that B's activations fit B's weights, not F's: another gradient, where D > 0
    order       "grouped", or "upstream", "sticky", "random", "skewed": other orders with the same weights
    seed        of order="random"

    Raises ValueError or TypeError, naming stage or option and the cure, before anything is trained.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Split,
        *,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer: OptimizerFactory,
        method: str | Method = "cerebras",
        micro_batch_size: int | None = None,
        workers: int | None = None,
        replicas: int | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float = 30.0,
        link: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto",
        init: Callable[[nn.Module], object] | str | Path | None = None,
        device: torch.device | str | None = None,
        store: str | Store | None = None,
        sparsity: str | Sparsity | None = None,
        skip_zeros: bool | Literal["auto"] = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        weights: Literal["equal", "samples"] = "equal",
        check_finite: bool = False,
        weight_functions: Literal["refuse", "warn"] = "refuse",
        stages: str | int | Sequence[str] = "auto",
        example: Any = None,
        leaves: Sequence[str] = (),
        balance: Literal["time", "memory"] = "time",
        masters: bool = False,
        compile: bool | dict[str, Any] = False,
        vectorize: bool | Literal["auto", "cuda_graph"] = False,
        activations: str | Sequence[str] | Mapping[str | int, str] = "device",
        order: str = "grouped",
        seed: int = 0,
    ) -> None:
        self.ranks: Ranks | SingleProcess = SingleProcess()
        if wanted(mesh):
            join(timeout)
            self.ranks = Ranks(layout(mesh, replicas), timeout)
        with self._telling():  # from here on: the other ranks have come, too, and would wait
            check_options(
                weights=weights, weight_functions=weight_functions, order=order, link=link, balance=balance,
                device=device, check_finite=check_finite, store=store, sparsity=sparsity, skip_zeros=skip_zeros,
                compile=compile, seed=seed, init=init, leaves=leaves,
            )  # fmt: skip
            policy = sparsities.create(sparsity) if isinstance(sparsity, str) else sparsity
            home = disk_store.create(store) or (DeviceStore() if policy is not None else None)
        with self._telling(), _closing(home):
            self.replicas = self.ranks.replicas if self.ranks.several else 1 if replicas is None else replicas
            if not isinstance(model, Split):
                model = split_model(model, stages, example, leaves, balance)
            self.split = model
            """How the model became stages; print it."""
            parts, self._program = self.split.parts, self.split.program
            self.method = methods.create(method) if isinstance(method, str) else method
            check_functions(self.method, loss, optimizer)
            check_numbers(
                len(parts),
                micro_batch_size=micro_batch_size, workers=workers, replicas=self.replicas,
                clip_norm=clip_norm, clip_value=clip_value, timeout=timeout, ranks=self.ranks.count,
            )  # fmt: skip
            if loss is None:
                check_outside(
                    workers=workers, micro_batch_size=micro_batch_size, weights=weights, check_finite=check_finite,
                    replicas=self.replicas,
                )  # fmt: skip
            check_masters(masters, home)
            check_skewed(
                vectorize, order, activations, masters, workers=(workers, None), replicas=(self.replicas, 1),
                ranks=(self.ranks.count, 1), store=(store, None), sparsity=(sparsity, None),
                loss=(loss if loss is None else "given", "given"),
            )  # fmt: skip
            self._compile = compile
            every = kinds(activations, [part.name for part in parts])
            self._model = self.split.model
            self._micro_batch_size, self._weights, self._workers = micro_batch_size, weights, workers
            self._outside = loss is None
            n = len(parts)
            self.method.check_stages(n)
            self.delays: list[int] = self.method.delays(n)
            """Staleness D of every stage: own updates between reading the weights of F(i) and B(i), counted."""
            building = StageBuilder(self.method, self.delays, loss, optimizer, every, masters, compile)
            self._stages = building.stages(parts, self.ranks.replica)
            named = {id(t): key for key, t in self._model.state_dict(keep_vars=True).items()}
            for stage in self._stages:
                stage.take_names(named)
            self._aliases = aliases(self._model)
            shards = self.ranks.several and self.replicas > 1 and not isinstance(home, DeviceStore | None)
            if shards:
                share_out(self._stages, self.ranks.replica, self.replicas, policy)
            if not any(stage.weights for stage in self._stages):
                raise ValueError(
                    "the model has no trainable parameters; set requires_grad before the pipeline is built"
                )
            self.optimizers: list[torch.optim.Optimizer] = [stage.optimizer for stage in self._stages]
            """One a stage; set rates here or attach schedulers. Options are copied when a micro-batch is pushed."""
            if isinstance(self.ranks, Ranks):
                agree(
                    self.ranks, self._stages, method=repr(self.method), micro_batch_size=micro_batch_size,
                    weights=weights, clip_norm=clip_norm, clip_value=clip_value, check_finite=check_finite, link=link,
                    activations=activations if isinstance(activations, str) else every,
                    masters=masters, compile=repr(compile),
                    store=home and f"{type(home).__name__}(prefetch={home.prefetch})",
                )  # fmt: skip
            where = device or default_device()
            if home is not None:
                check_stages(self._stages, home, alone=not self.ranks.several and policy is None)
                home.open(self.ranks.place)
            if isinstance(home, DiskStore):
                commits.choose(home, self.ranks)
            self._holding = HeldStages(
                [self._stages], self.method, self.ranks, workers, init, where, home, policy, skip_zeros, shards,
            )  # fmt: skip
            self._holding.compute = None if device is None else torch.device(device)
            if not self.ranks.several:
                self._holding.everywhere += building.twins(parts, self._program, self.replicas)
                self._holding.take_up()
        self._entrance = MicroBatcher(self._program, self._holding.everywhere)
        self._intact = Intact(self._model, self._stages)
        self._followers = Followers(self._holding.everywhere)
        self._setting = Setting(
            self.delays, order, seed, link, workers,
            {"clip_norm": clip_norm, "clip_value": clip_value, "samples": weights == "samples",
             "check_finite": check_finite},
            stacked(self._stages, self.method, compile, vectorize),
        )  # fmt: skip
        self._vectorize = vectorize
        self.vectorized: dict[str, str] = {}
        """With vectorize=: what became of each run of stages that look alike, once the first micro-batch was there."""
        self._options = Options(self.optimizers, 0)
        self._arrived = 0
        self._rehearsals = Rehearsals(self._holding, self.delays, warn=weight_functions == "warn")
        self._ahead = OutsideLoss(self.method)
        self._observing = Observers()
        self._commits = commits.Commits(self.method, home)
        self._error: BaseException | None = None
        self._runtime: Runner | None = None
        self._finalizer: Any = None  # stops the threads of a pipeline that nobody holds
        self._lock, self._process = Turn(), os.getpid()  # one caller at a time, and not in a child of fork
        self._modes = Modes(self._settable(), self._lock, self._settle)
        self._pushed = (0, 0)  # micro-batches of the last push, and samples of its first one
        self._affordable = 0  # micro-batches of a push that are known to fit the store's budgets
        if home is not None:
            weakref.finalize(self, home.close)
        with self._telling(), _closing(home):
            self._resume()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What fails on one rank before training is told to the others, which would wait for it."""
        try:
            yield
        except BaseException as error:
            self.ranks.failed(error)
            raise

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
            with self._telling():
                batches = self._batches(x, y)
                runtime = self._ready(batches)
            first = self._arrived
            self._arrived += len(batches) // len(self._holding.everywhere)
            self._modes.pushed()
            try:
                losses = self._do(partial(runtime.push, first, batches, self._options), harmless=(Dropped,))
            except Dropped:
                self._arrived = runtime.loops[0].order.arrived
                raise
            self._commit_if_due()
            weigh = self._weights == "samples" and len(batches) > 1
            return losses([size for _, _, size in batches] if weigh else None)

    def forward(self, x: Value, *, expected: int = 1) -> Value:
        """F of one micro-batch x (N, …) at every stage, for a loss that is computed outside (`loss=None`).

        Returns the model's output, cut from its graph and requiring a gradient: compute the loss from it,
        differentiate, and give `backward` the output's gradient; `forget` lets the micro-batch fall instead. Over
        processes the last rank gets the output, and the others None at once.
        expected: micro-batches until the next `step`, for methods that flush once a push; more than come is no harm.
        """
        (output,) = self.forward_many([x], expected=expected)
        return output

    def forward_many(self, xs: Sequence[Value], *, expected: int = 1) -> list[Value]:
        """F of several micro-batches, all at one stage before any at the next: a streamed stage comes once.

        They must lie in one flush, which `together` says. Returns the output of each, as `forward` does; give
        `backward_many` their gradients.
        """
        with self._lock, torch.enable_grad():
            self._one_by_one()
            if not xs or not self.together(len(xs), expected=expected):
                raise ValueError(
                    f"{len(xs)} micro-batches do not lie in one flush of {self.method!r}; call forward and backward "
                    "for one after the other"
                )
            batches = [batch for x in xs for batch in self._batches(x, None)]
            runtime, xs = self._ready(batches, expected), [x for x, _, _ in batches]
            assert isinstance(runtime, (EventLoop, RankRunner))
            self._ahead.expect(expected)
            self._modes.pushed()
            outputs: list[Value] = self._do(partial(runtime.forward, self._arrived, xs, self._options, expected))
            self._ahead.count = len(xs)
            self._holding.hide()  # from who clears them before the backward
            for output in outputs:
                for part in output if isinstance(output, tuple) else (output,):
                    if isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()):
                        part.requires_grad_()
            return [self._entrance.leave(output, x) for output, x in zip(outputs, xs, strict=True)]

    def together(self, count: int, *, expected: int = 1) -> bool:
        """Whether the next `count` micro-batches may all go forward before one goes backward: no update lies between.

        expected: as `forward` will be given it.
        """
        return self._ahead.together(count, self._arrived, expected)

    def backward(self, gradient: Value = None) -> None:
        """B, wherever it may be done now, once the loss's gradient with respect to the output of `forward` is known.

        gradient: shaped like the output (for a tuple, None where the loss does not depend on a part). The updates that
        this makes due come with `step`, the next `forward`, or whatever quiesces the pipeline. Over processes the last
        rank gives the gradient, the others call it with None.
        """
        self._backward([gradient])

    def backward_many(self, gradients: Sequence[Value]) -> None:
        """`backward` for the micro-batches of `forward_many`: all of them at one stage before any at the one before.

        gradients: one a micro-batch, in their order. One that is None (a tuple of Nones) lets its micro-batch fall, but
        over processes, where ranks without the loss give Nones.
        """
        self._backward(gradients, forget=not self.ranks.several)

    def _backward(self, gradients: Sequence[Value], forget: bool = False) -> None:
        with self._lock, torch.enable_grad():
            runtime = self._went_ahead("backward")
            if len(gradients) != self._ahead.count:
                raise ValueError(
                    f"backward was given {len(gradients)} gradients, forward {self._ahead.count} inputs; give as many"
                )
            ahead, fallen = self._ahead.take(), [n for n, g in enumerate(gradients) if forget and nothing(g)]
            if fallen:
                assert isinstance(runtime, EventLoop)
                runtime.loop.forget(fallen, ahead)
                gradients = [g for g in gradients if not nothing(g)]
            if gradients:
                self._arrived += len(gradients)
                self._ahead.backward(len(gradients))
                self._modes.pushed()
                self._do(partial(runtime.backward, gradients))

    def forget(self) -> None:
        """Let what the last `forward` was given fall: no stage will see a backward or an update of it."""
        with self._lock:
            runtime = self._went_ahead("forget")
            if isinstance(runtime, RankRunner):
                raise RuntimeError("forget: the other ranks are ahead already; give backward a gradient of zeros")
            ahead = self._ahead.take()
            runtime.loop.forget(range(ahead), ahead)

    def step(self) -> None:
        """Do the updates that are due. A method that flushes once a push ends its flush here, as after a push."""
        with self._lock, torch.enable_grad():
            self._open()
            if isinstance(self._runtime, (EventLoop, RankRunner)):
                self._modes.pushed()
                self._do(partial(self._runtime.step, self.method.flush_each_push))
                self._holding.hide()
                if self.method.flush_each_push:
                    self._ahead.restart()
                self._commit_if_due()

    def _batches(self, x: Any, y: Any) -> list[Batch]:
        return self._entrance.batches(x, y, self._micro_batch_size, self.wait)

    def _one_by_one(self) -> None:
        self._open()
        if not self._outside:
            raise RuntimeError("forward is for a pipeline built with loss=None; this one has a loss: call push")
        if self._ahead.count:
            raise RuntimeError("forward was called twice; call backward or forget between")

    def _went_ahead(self, what: str) -> EventLoop | RankRunner:
        self._open()
        if not self._ahead.count:
            raise RuntimeError(f"{what} comes after forward, but no micro-batch has gone forward")
        assert isinstance(self._runtime, (EventLoop, RankRunner))
        return self._runtime

    def _ready(self, batches: Sequence[Batch], expected: int | None = None) -> Runner:
        """Everything checked and the runtime there, before a micro-batch is let in. expected: micro-batches a push."""
        self._open()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("push trains, which inference mode forbids; call it outside torch.inference_mode()")
        self._intact.check()
        self._followers.follow(self.wait)
        self._rehearse(batches)
        self._pushed = expected or len(batches) // len(self._holding.everywhere), batches[0][2]
        self._afford(*self._pushed)
        if not self._options.current(self.optimizers):
            check_groups(self._stages)
            self._options = Options(self.optimizers, self._arrived)
        assert self._runtime is not None
        return self._runtime

    def _afford(self, micro_batches: int, samples: int) -> None:
        """Raise where a push of so many micro-batches does not fit the store's budgets."""
        store = self._holding.store
        if store is not None and store.budgets != (None, None) and micro_batches > self._affordable:
            check(survey(self._holding, self._setting, samples, timed=False), micro_batches)
            self._affordable = micro_batches

    def wait(self) -> None:
        """Quiesce: return when everything that data flow and programs allow has been done."""
        with self._lock, torch.enable_grad():
            self._open()
            if self._runtime is not None:
                self._do(
                    self._runtime.wait, harmless=() if isinstance(self._runtime, EventLoop) else (KeyboardInterrupt,)
                )
            self._modes.done()

    def drain(self) -> None:
        """Finish what is in flight; what is pushed afterwards fills the pipeline anew."""
        with self._lock, torch.enable_grad():
            self._open()
            if self._runtime is not None:
                self._do(self._runtime.drain)
                self._modes.done()
                self._commits.restart(self._arrived)
                self._ahead.restart()
                self._commit_if_due()

    def evaluate(self, x: Value) -> Any:
        """The model's output for x (N, …) in evaluation mode on the newest weights, without gradients.

        Over processes every rank calls it with the same x and gets the output; replicas use their own batch statistics.
        What is in flight, buffers and the training mode of every module stay as they are.
        """
        with self._lock, torch.no_grad():
            self.wait()
            try:
                x = self._entrance.enter(x, self.wait, training=False)
                if isinstance(self._runtime, RankRunner):
                    found = self._do(partial(self._runtime.relay, x, self._through_each, back=True))
                else:
                    found = self._through_each(self._stages, x)
                return self._entrance.leave(found, x, training=False)
            finally:
                self._entrance.evaluated()

    def run(self, x: Value) -> Any:
        """The model's output for x (N, …), without gradients, as its modules are set to train or to evaluate.

        So batch statistics change, and layers draw, as they would in a call of the model. In one process.
        """
        if self.ranks.several:
            raise RuntimeError("run is for one process; over several, evaluate asks all ranks")
        with self._lock, torch.no_grad():
            self.wait()
            value = x = self._entrance.enter(x, self.wait)
            for stage in self._stages:
                with self._holding.present(stage):
                    value = stage.module(stage.enter(value)[1])
            return self._entrance.leave(cut(value), x)

    def _through_each(self, stages: Sequence[Stage], value: Value) -> Value:
        for stage in stages:
            with self._holding.present(stage):
                value = evaluate([stage], value)
        return value

    @contextmanager
    def present(self, stage: int) -> Iterator[None]:
        """Meanwhile a stage's parameters hold its newest weights where it computes, to be read only.

        Stages that live in a store are elsewhere between two pushes. Over processes: a stage that this rank holds.
        """
        with self._lock, torch.no_grad():
            self.wait()
            with self._holding.present(self._stages[stage]):
                yield

    @contextmanager
    def shown(self, *, changes: bool = False) -> Iterator[None]:
        """Meanwhile all parameters hold the newest weights, in host memory where a store has them, optimizer state too.

        changes: what is written there is kept. With a disk store all of it must fit, and is gone afterwards: copy it.
        Over processes: of the stages that this rank holds.
        """
        with self._lock:
            if self._error is None:
                self.wait()
            for loop in self._loops() if self._error is not None else ():
                with suppress(Exception):  # whatever it is, the error before it is the one to be told
                    loop.worker.residence.rest()
            with self._holding.shown(changes=changes):
                yield

    def close(self) -> None:
        """Stop the worker threads, if any; what is in flight is lost. Over processes this rank leaves the pipeline.

        What was pushed is done first as far as it may be, since other ranks wait for it.
        """
        with self._lock:
            if os.getpid() != self._process:
                return
            if self._error is None and self.ranks.several:
                with suppress(Exception):  # then the others know it, too
                    self.wait()
            self._stop()
            self.ranks.leave()
            if self._holding.store is not None:
                self._holding.store.close()
            self._error = self._error or RuntimeError("close() was called")

    # -- a store that survives -----------------------------------------------------------------------------------

    @property
    def arrived(self) -> int:
        """Micro-batches pushed so far; after a store's folder was resumed, those that its last version has seen."""
        return self._arrived

    def commit(self) -> None:
        """Have the disk store keep everything as it is now, micro-batches in flight included. Every rank calls it.

        Methods that flush do so at each flush, others every `DiskStore.commit_every` micro-batches.
        """
        with self._lock:
            store = self._holding.store
            if not isinstance(store, DiskStore):
                raise RuntimeError(
                    'commit: weights are not on disk; use store="disk:FOLDER", or pipeback.checkpoint.save'
                )
            if self._runtime is None and self.ranks.several:
                raise RuntimeError("commit: no rank has its stages before the first push; call it afterwards")
            self.wait()
            saving = partial(self._holding.saving, opened=False)
            mine = self._holding.mine
            self._do(partial(commits.commit, store, self.ranks, mine, self._loops(), self.plain(), saving))
            self._commits.made(self._arrived)

    def _commit_if_due(self) -> None:
        if self._commits.due(self._arrived):
            self.commit()

    def _resume(self) -> None:
        """Take up what the store's folder holds."""
        store = self._holding.store
        if not isinstance(store, DiskStore) or store.committed is None:
            return
        mine = self.would_hold(store.committed["state"]["plain"])
        saved = commits.found(store, self.ranks, mine, len(self._stages))
        try:
            self.load_state_dict(saved or {})
        except ValueError as error:
            raise StoreError(f"{store.folder}: {error}; or give the store another folder") from error
        self._commits.made(self._arrived)

    # -- looking in ----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether an error or `close` has ended it; `load_state_dict` reopens it."""
        return self._error is not None

    @property
    def model(self) -> nn.Module:
        """The user's module with its newest weights (a list is given back as an nn.Sequential of its modules).

        Over processes, on disk, or with sparsity it is a copy; over processes every rank asks for it.
        """
        self.wait()
        if not self.ranks.several and all(stage.slot is None or stage.slot.shows for stage in self._stages):
            return self._model
        if self._runtime is None and self.ranks.several:
            return self._model
        return self._holding.whole(self._model)

    @property
    def ledger(self) -> Sequence[Record]:
        """Records (stage, kind, mb, version) of every F and B; each worker keeps the last million of its own.

        Over processes: of this rank's stages. With replicas in one process: of the first.
        """
        self.wait()
        loops = [loop for loop in self._loops() if loop.replica == self.ranks.replica]
        return loops[0].worker.ledger if len(loops) == 1 else [r for loop in loops for r in loop.worker.ledger]

    def memory(self) -> Memory:
        """Weights, copies, method state and activations; the numbers the memory law compares with the declared ones.

        Over processes: of the stages that this rank holds.
        """
        self.wait()
        return memory_use.counted(self._holding.mine, self.owner)

    def traffic(self) -> Traffic:
        """What the store's stages have cost since the first push: bytes, fetches, seconds of waiting.

        Over processes: of the stages that this rank holds. Without a store everything is zero.
        """
        self.wait()
        streams = [loop.worker.residence for loop in self._loops()]
        found, store = together(s.traffic for s in streams if isinstance(s, StreamedWeights)), self._holding.store
        read, written = store.moved if isinstance(store, DiskStore) else (0, 0)
        return found._replace(read=read, written=written)

    def plan(self, x: Value = None, y: Any = None, *, pushes: int | None = None, expected: int = 1) -> Plan:
        """What training takes, before it begins: bytes on device, host and disk, weight passes, waiting, batch window.

        x, y: a push, which is rehearsed and not trained on; None: like the last one. pushes: averages are of so many
        between two calls of `traffic`, to be compared with it (`pipeback.plan.beside`); None: of the steady state.
        expected: for a loss that is computed outside, micro-batches until the next `step`, of which x is one.
        Bandwidths are measured. `print` it. Over processes: of the stages that this rank holds, for which it asks alone
        once something was pushed, and together with all ranks before.
        """
        with self._lock, torch.enable_grad():
            self._open()
            if x is not None:
                with self._telling():
                    batches = self._batches(x, y)
                    self._rehearse(batches)
                here = len(self._holding.everywhere)
                self._pushed = expected if self._outside else len(batches) // here, batches[0][2]
            count, samples = self._pushed
            if not count:
                raise ValueError("plan: nothing was pushed yet; give it a push: pipe.plan(x, y)")
            return plan(survey(self._holding, self._setting, samples), count, pushes)

    def breakdown(self, x: Value, y: Any = None) -> list[StageRow]:
        """What each stage is and costs, a `StageRow` per stage: layers, parameters, FLOPs, seconds, activations, delay.

        x, y: a push, of which a micro-batch is rehearsed and not trained on. In one process.
        """
        with self._lock, torch.enable_grad():
            self._open()
            if self.ranks.several:
                raise RuntimeError("breakdown: other ranks have stages of the model; ask for it in one process")
            batches = self._batches(x, y)
            self._rehearse(batches)
            self.wait()
            return breakdown(self._stages, self._holding.seconds, self.delays, *batches[0][:2], self._holding.present)

    def record(self, on: bool = True) -> None:
        """Measure every operation from now on (same bits, one operation at a time), for `pipeback.draw.trace`.

        Over processes every rank calls it: their clocks are compared.
        """
        self.wait()
        self._observing.record(self._loops(), self.ranks, on)

    def watch(self, on: bool = True) -> Watch:
        """Follow micro-batches from now on, at one more copy of the weights: `Watch` says what it tells.

        Over processes: of the stages that this rank holds, for which it follows micro-batches on its own.
        """
        if not self.ranks.several and (self._workers is not None or self.replicas > 1):
            raise ValueError("workers, replicas: watch does not follow threads; use workers=None and no replicas")
        if self._holding.shards:
            raise ValueError("store: watch measures whole weights, of which a rank's store has a slice; use store=None")
        self.wait()
        return self._observing.watch(self._loops(), len(self._stages), on)

    def clip(self, norm: float | None = None, value: float | None = None) -> None:
        """Clip the updates that come otherwise than the pipeline was built to; those that are due are such."""
        check_numbers(len(self._stages), clip_norm=norm, clip_value=value)
        self._setting.worker.update(clip_norm=norm, clip_value=value)
        if self._runtime is not None:
            self._do(partial(self._runtime.tell, partial(_clip, norm=norm, value=value)))

    @property
    def recorded(self) -> Recording:
        """What `record` measured: a `Slot` an operation, in seconds from the first one, all workers on one clock.

        Over processes every rank asks for it, and gets what all ranks measured.
        """
        self.wait()
        tracks = self._observing.tracks(self._loops(), self.ranks, self.owner)
        return Recording(tracks, self.owner, repr(self.method))

    @property
    def owner(self) -> list[int]:
        """The worker of each stage."""
        return self._holding.balance() if self._runtime is None else self._runtime.owner

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, micro-batches in flight included: {"format", "stages": tensors a stage, "plain": JSON values}.

        Copies, so that later pushes do not change it. Loads with `torch.load(weights_only=True)`; the same layout for
        every runtime. Training on from it gives the same bits. Over processes every rank calls it and gets the whole.
        """
        with self._lock:
            return pipeline_state.merge(self.ranks.gather(self.share(), "state_dict()"), self.plain())

    def share(self, take: Callable[[Stage, dict[str, Tensor]], None] | None = None) -> pipeline_state.Share:
        """What this process holds of the state, of which `checkpoint.save` writes what is whose.

        take: is given the tensors of one stage after the other, so that no more than a few stages' copies exist.
        """
        with self._lock:
            self.wait()
            if self._ahead.count:
                raise RuntimeError("a micro-batch has gone forward; call backward or forget before taking the state")
            mine = self._holding.mine
            return pipeline_state.share(mine, self._loops(), self._holding.saving, take)

    @property
    def stages(self) -> int:
        """How many stages the model has."""
        return len(self._stages)

    def values(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(stage, copies of its newest weights and buffers), one of this process's stages after the other.

        Under the names that they have in the user's model; a weight that has several comes under each.
        """
        self.wait()
        for stage in self._holding.mine:
            if not stage.replica:
                found = self._holding.values(stage).items()
                yield stage.index, {name: v for key, v in found for name in self._aliases[stage.names[key]]}

    def expanded(self, weight: Tensor, value: Tensor) -> Tensor:
        """What belongs to the survivors of a weight, in a dense tensor. weight: as the optimizer has it."""
        for stage in self._holding.mine:
            for n, w in enumerate(stage.weights):
                if w is weight and stage.sparse is not None:
                    return stage.sparse.expanded(stage, n, value)
        return value

    @property
    def streamed(self) -> bool:
        """Whether weights live in a store."""
        return self._holding.store is not None

    @property
    def held(self) -> list[tuple[int, int]]:
        """(stage, replica) of all stages that this process holds."""
        return [(stage.index, stage.replica) for stage in self._holding.mine]

    def plain(self) -> dict[str, Any]:
        """What belongs to no stage: the same on every rank."""
        current = self._options
        if not current.current(self.optimizers):
            current = Options(self.optimizers, self._arrived)
        return {
            "method": type(self.method).__name__,
            "method_options": self.method.options(),
            "optimizer": [type(opt).__name__ for opt in self.optimizers],
            "arrived": self._arrived,
            "weights": self._weights,
            "sparsity": repr(self._holding.sparsity),
            "replicas": self.replicas,
            "seconds": self._holding.seconds,
            "groups": {str(current.since): [plain_groups(g) for g in current.groups]},
            "current": current.since,
            **({} if self._program is None else {"forms": self._program.forms()}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state of `state_dict`. Reopens a closed pipeline.

        Raises ValueError before anything changes when method, optimizers, weights or buffers differ; when the rest
        does not fit (the same weights under other layers), the pipeline is closed.
        """
        with self._lock:
            if self._holding.store is not None and self._holding.store.closed:
                raise RuntimeError(
                    "the store was closed with the pipeline; build a new Pipeline, which goes on from it"
                )
            plain = pipeline_state.fits(
                state_dict, self._stages, self.method, self.optimizers,
                weights=self._weights, replicas=self.replicas, sparsity=repr(self._holding.sparsity),
            )  # fmt: skip
            if self._error is None:
                self.wait()
                self.ranks.gather(None, "load_state_dict()")  # nobody waits for a message any more
            self._stop()
            if self._error is not None and isinstance(self.ranks, Ranks):
                self.ranks.leave()  # what has failed, or left, is told once
                self.ranks = self._holding.ranks = Ranks(self.ranks.table, self.ranks.timeout)
            self._error = None
            self._do(partial(self._take_up, state_dict, plain))
            self._followers.remember()

    def would_hold(self, plain: dict[str, Any]) -> list[int] | None:
        """The stages whose tensors this process needs of a state with these plain values; None: all."""
        return self._holding.would_hold(plain["seconds"]) if plain["loops"] else None

    def _take_up(self, saved: dict[str, Any], plain: dict[str, Any]) -> None:
        pipeline_state.put_options(plain, self.optimizers)
        options = pipeline_state.options_of(plain, self.optimizers)
        self._options = options[plain["current"]]
        self._arrived, self._holding.seconds = plain["arrived"], plain["seconds"]
        self._rehearsals.forget()
        if self._program is not None:
            self._program.know(plain.get("forms", ()))
        if plain["loops"]:
            self._holding.share_out(values=False)
            self._holding.lay()
        messages: dict[int, Messages] = {}
        with torch.enable_grad():
            for stage in self._holding.mine:
                holding = self._holding
                loaded = pipeline_state.load(
                    stage, saved, options, partial(holding.opened, changes=True), holding.present
                )
                messages.setdefault(stage.replica, {}).update(loaded)
        loops = plain["loops"]
        self._commits.restart(loops[0]["order"]["start"] if loops and not loops[0]["fresh"] else self._arrived)
        if plain["loops"]:
            self._start()
            assert self._runtime is not None
            for loop in self._runtime.loops:
                loop.resume(plain["loops"][loop.replica], messages.get(loop.replica, {}), options)
        places = [place for place in plain["loops"][:1] if not place["fresh"]]
        begun = sum(self._arrived - place["order"]["start"] for place in places)
        self._ahead.take_up(begun, sum(place.get("pushed", 1) for place in places))

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._finalizer is not None or self._holding.store is not None:
            forked.refuse(self._process)
        if self._error is not None:
            raise closed(self._error) from self._error

    def _do(self, what: Callable[[], Any], harmless: tuple[type[BaseException], ...] = ()) -> Any:
        """Do it; whatever it raises closes the pipeline, for a wave may be half done, but what only ends a wait."""
        try:
            return what()
        except harmless:
            raise
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
        self._modes.leave()

    def _loops(self) -> list[Loop]:
        return [] if self._runtime is None else self._runtime.loops

    # -- the first micro-batch -----------------------------------------------------------------------------------

    def _rehearse(self, batches: Sequence[Batch]) -> None:
        threads = self._workers is not None or self.replicas > 1 or self.ranks.several
        if accelerators.autocast():
            if threads:
                raise ValueError("workers: autocast does not reach other threads; enter it inside the modules")
            if self._setting.stacks:
                raise ValueError("vectorize: stages that run as one know no autocast; enter it inside the modules")
        if not self._rehearsals.due(batches):
            return
        if self._runtime is not None:
            if self._modes.unheard and self._rehearsals.set_otherwise:
                warnings.warn(OTHERWISE, stacklevel=4)
            self._do(self._runtime.wait)  # buffers and random state are borrowed and put back
        relay = self._relay if isinstance(self._runtime, RankRunner) else None
        sizes = self._rehearsals.run(batches, relay)
        if sizes and self._setting.stacks:
            stacks = self._setting.stacks
            kept, told = fitting(
                self._stages, stacks, [batches[0][0], smallest(batches)[0]], self.method, self._vectorize,
                self._options, self._setting.worker, again=bool(self.vectorized),
            )  # fmt: skip
            self.vectorized = self.vectorized or told
            self._setting = self._setting._replace(stacks=kept)
            if len(kept) < len(stacks):
                for loop in self._loops():  # of a state that was taken up
                    loop.worker.leave([stack for stack in stacks if stack not in kept])
                if self._compile:  # what is left compiles, and is checked, on its own
                    self._rehearsals.whole(batches[0], relay)
        if self._runtime is None:
            if self.ranks.several:
                self._holding.seconds = self.ranks.gather(self._holding.seconds, "push()")[0]
                self._holding.share_out(values=True)
            self._holding.lay()
            self._start()
        self._rehearsals.done(batches)

    def _relay(self, x: Value, part: Callable[[Sequence[Stage], Value], Value]) -> None:
        assert isinstance(self._runtime, RankRunner)
        self._do(partial(self._runtime.relay, x, part, back=False))

    def _start(self) -> None:
        self._runtime = start(self._holding, self._setting)
        if isinstance(self._runtime, TickLoop):
            self._runtime.settle = _weakly(self.wait)
        if not isinstance(self._runtime, EventLoop) or self._holding.store is not None:
            self._finalizer = weakref.finalize(self, _end, self._runtime, self.ranks, self._process)
        self._observing.started(self._loops())
        if type(self._runtime) is not EventLoop:
            self._modes.listen()

    def _settable(self) -> Iterator[nn.Module]:
        """The modules that somebody may set to train or to evaluate."""
        yield from self._model.modules()
        for stage in self._stages:
            yield from stage.module.modules()

    def _settle(self) -> None:
        """A module is about to be set to train or to evaluate."""
        if self._error is None and os.getpid() == self._process:
            self.wait()


@contextmanager
def _closing(store: Store | None) -> Iterator[None]:
    """A pipeline that cannot be built lets its store go."""
    try:
        yield
    except BaseException:
        if store is not None:
            store.close()
        raise


def _end(runtime: Runner, ranks: Ranks | SingleProcess, process: int) -> None:
    if os.getpid() == process:  # a child of fork has no threads to end
        runtime.close()
        ranks.leave()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A method of an object that is not to be kept alive by it."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        there = held()
        if there is None:
            raise RuntimeError("the pipeline is gone, and with it what was pushed and not done")
        there()

    return call


def _clip(loop: Loop, norm: float | None, value: float | None) -> None:
    loop.worker.clip_norm, loop.worker.clip_value = norm, value
