"""Pipeline: the public class. Micro-batches come in, the order says what may run, and workers run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

import pipeback
from pipeback.checkpoint.pipeline_state import Share
from pipeback.distributed.ranks import Ranks, SingleProcess
from pipeback.methods.base import Method
from pipeback.notebook import Drawing
from pipeback.pipeline.arguments import (
    Clipping,
    Debug,
    MicroBatches,
    Processes,
    Splitting,
    Streaming,
    TensorParallel,
    as_long,
    knowing,
)
from pipeback.pipeline.breakdown import Breakdown
from pipeback.pipeline.build import build, releasing, telling
from pipeback.pipeline.engine import Engine
from pipeback.pipeline.evaluation import Evaluation
from pipeback.pipeline.held_out import Judge
from pipeback.pipeline.inspection import Inspection
from pipeback.pipeline.memory_use import Memory
from pipeback.pipeline.options import PipelineOptions
from pipeback.pipeline.outside_calls import OutsideCalls
from pipeback.pipeline.outside_loss import OutsideLoss
from pipeback.pipeline.saving import Saving
from pipeback.pipeline.take_back import TakeBack
from pipeback.runtime.ledger import Record
from pipeback.runtime.staleness import Watch
from pipeback.schedules.recording import Recording
from pipeback.splitting.split import Split
from pipeback.stages.flight import Value
from pipeback.stages.stage import OptimizerFactory, Stage
from pipeback.streaming.store import Store
from pipeback.streaming.traffic import Traffic
from pipeback.tensor_parallel import ExpertLoad


class Pipeline(OutsideCalls):
    """Train `model` by pipelined backpropagation. Its stages run forwards (F), backwards (B) and updates (U) at once.

    What is trained
    model       an nn.Sequential or a list of modules, one stage each; or any other module, whose forward is traced on
                `example`; or a `Split`. The modules are trained in place
    loss        (output, target) -> 0-d tensor, the mean over the micro-batch; None: you compute the loss yourself,
                between `forward` and `backward`
    optimizer   parameters -> torch.optim.Optimizer, per stage; `lambda named_parameters: ...` is given names, too
    method      a name of `pipeback.methods.available()` or a `Method`; None: "cerebras" if the optimizer allows it
    micro_batch_size  samples per micro-batch, the last of a push may have fewer; None: a push. Or a `MicroBatches`
    reference_batch  samples per update for which SGD's rate and momentum were chosen; they are scaled to those here
    stages      where a traced model is cut: at each "block", "layer" or "sublayer", "auto", into a number of stages,
                or at named modules. A sequence takes "auto" (one stage per module) or a number. Or a `Splitting`
    example     an x as you push it, on which the forward is traced: a tensor, a tuple of positional arguments, a dict
                (or what a tokenizer gives) of keyword arguments, or any structure for a forward of one argument

    Workers, and where weights and activations are kept
    workers     threads that share the stages, balanced by measured time; None: one event loop. Under torchrun, or in a
                process group of several ranks, each rank is a worker, which a `Processes` configures
    replicas    pipelines on different data that average their gradients at each update. In one process, each push is
                cut into that many parts, equal ones if they can be; over processes, each replica pushes its own data
    tensor_parallel  ranks that compute each stage together, each with a shard of its weights; or a `TensorParallel`
    store       where weights live. None: on the device; "host", "disk:FOLDER" or a `Store`: there, and a stage's
                weights are copied to the device when needed; or a `Streaming`, which has sparse weights, too
    activations what a stage keeps from F to B: "device", all that autograd saves; "host", the same in host memory;
                "recompute", only its input. A list has one kind per stage, a dict {stage's name or number: kind}
    masters     True: the optimizer steps float32 copies of half-type weights; F and B use these copies, rounded

    Speed, clipping and debugging
    compile     True, or a dict of torch.compile's options: the forward of every stage is compiled for training
    vectorize   run stages that are alike as one, wherever they stand: True, "auto" (where this was measured to be
                faster; on one GPU as "cuda_graph", if pushes are long) or "cuda_graph". Results differ from those of
                the event loop in rounding; losses are lazy
    clip_norm   largest norm of a stage's averaged gradient, before the method uses it; or a `Clipping`
    debug       a `Debug`: the order of operations, checks of losses, layers that save functions of weights

    Raises ValueError or TypeError before anything is trained; the message names the stage or option and the cure.
    """

    @knowing
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Split,
        *,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer: OptimizerFactory,
        method: str | Method | None = None,
        micro_batch_size: int | MicroBatches | None = None,
        reference_batch: int | None = None,
        stages: str | int | Sequence[str] | Splitting = "auto",
        example: Any = None,
        workers: int | Processes | None = None,
        replicas: int | None = None,
        tensor_parallel: int | TensorParallel = 1,
        store: str | Store | Streaming | None = None,
        activations: str | Sequence[str] | Mapping[str | int, str] = "device",
        masters: bool = False,
        compile: bool | dict[str, Any] = False,
        vectorize: bool | Literal["auto", "cuda_graph"] = False,
        clip_norm: float | Clipping | None = None,
        debug: Debug | None = None,
    ) -> None:
        options = PipelineOptions(
            loss, optimizer, method, as_long(MicroBatches, micro_batch_size), as_long(Splitting, stages), example,
            None if isinstance(workers, Processes) else workers,
            workers if isinstance(workers, Processes) else Processes(), replicas, as_long(Streaming, store),
            activations, masters, compile, vectorize, as_long(Clipping, clip_norm), Debug() if debug is None else debug,
            reference_batch, as_long(TensorParallel, tensor_parallel),
        )  # fmt: skip
        built = build(model, options)
        self._engine = Engine(built)
        self._outside = OutsideLoss(self._engine)
        self._saving = Saving(self._engine, self._outside.ahead, built)
        self._take_back = (
            None if (every := options.debug.take_back) is None else TakeBack(self._engine, self._saving, every)
        )
        self._engine.kept = self._take_back
        self._evaluation = Evaluation(self._engine, built.aliases, self._outside.check_anew)
        self._inspection = Inspection(self._engine)
        self.split: Split = built.split  #: How the model became stages; print it or draw it.
        self.method: Method = built.method
        self.replicas: int = built.replicas
        self.delays: list[int] = built.delays
        """Delay D of each stage: its updates between F and B of a micro-batch, counted on the schedule."""
        self.optimizers: list[Optimizer] = built.optimizers
        """One per stage; set rates here or attach schedulers. Options are copied when a micro-batch is pushed. The
        state in a disk store is NaN outside of `shown`."""
        with telling(self.ranks), releasing(self._engine.release):
            self._saving.resume()

    def push(self, x: Value, y: Any = None) -> Tensor:
        """Train on x and y; returns the mean loss of the micro-batches just pushed, a detached 0-d tensor.

        x: a tensor (N, …), a tuple of tensors, or as `example`. y: the target of `loss`, any structure, cut like x by
        the first dimension. Both may be filled anew once this returns. Workers give lazy losses: reading one waits.
        """
        push = self._engine.push if self._take_back is None else self._take_back.push
        return push(x, y, self._saving.commit_if_due)

    def wait(self) -> None:
        """Quiesce: return when every operation that the data flow and the schedule allow has been done."""
        self._engine.wait()
        self._engine.ranks.meet("wait()")

    def drain(self) -> None:
        """Finish every micro-batch in flight; the next push fills the pipeline anew."""
        self._engine.drain(self._saving.drained)

    def clip(self, norm: float | None = None, value: float | None = None) -> None:
        """Clip by other bounds every update that has not begun yet, even if it is due already."""
        self._engine.clip(norm, value)

    def evaluate(
        self, x: Any, y: Any = None, *, batch_size: int | None = None, metrics: Mapping[str, Judge] | None = None
    ) -> Any:
        """The output for x (N, …) in evaluation mode on the newest weights, without gradients. Nothing changes but what
        the forward itself writes into in that mode, as in a plain loop.

        With y, or for a loader or list of pairs (x, y): the mean loss over all samples, a 0-d float64 tensor.
        batch_size: samples computed at once. metrics: {name: (output, y) -> mean over the batch}; then {"loss": mean,
        name: mean}. Over processes every rank calls it with the same data; replicas use their own batch statistics.
        """
        return self._evaluation.evaluate(x, y, batch_size, metrics)

    def run(self, x: Value) -> Any:
        """The output for x (N, …) that calling the model gives: buffers change, layers draw. In one process only."""
        return self._evaluation.run(x)

    def present(self, stage: int) -> AbstractContextManager[None]:
        """A context in which a stage of this rank has its newest weights where it computes, for reading only."""
        return self._evaluation.present(stage)

    def shown(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """A context in which the parameters of this rank hold the newest weights; in host memory, optimizer state too.

        changes: keep what is written there. With a disk store all must fit into memory and is gone afterwards: copy it.
        """
        return self._evaluation.shown(changes)

    @property
    def model(self) -> nn.Module:
        """The user's module with its newest weights. A copy over processes (every rank asks), on disk or if sparse."""
        return self._evaluation.whole()

    def values(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Stage by stage: (stage, copies of its newest weights and buffers, under all their names in the model)."""
        return self._evaluation.values()

    def expanded(self, weight: Tensor, value: Tensor) -> Tensor:
        """The dense form of `value`, which belongs to a weight's survivors. weight: as the optimizer has it."""
        return self._evaluation.expanded(weight, value)

    def state_dict(self) -> dict[str, Any]:
        """Everything, micro-batches in flight included: {"format", "stages": tensors per stage, "plain": JSON values}.

        Copies that load with `torch.load(weights_only=True)`, in any runtime; training resumes with the same bits. Over
        processes every rank calls this and gets the whole.
        """
        return self._saving.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of `state_dict`. Reopens a closed pipeline.

        Raises ValueError before anything changes if the method, optimizers, weights or buffers differ; what else does
        not fit (the same weights under other layers) closes the pipeline.
        """
        self._saving.load(state_dict)

    def commit(self) -> None:
        """Write a version of everything to the disk store, micro-batches in flight included. Every rank calls it."""
        self._saving.commit()

    def share(self, take: Callable[[Stage, dict[str, Tensor]], None] | None = None) -> Share:
        """The part of the state that this process holds. take: a function that gets each stage's tensors in turn."""
        return self._saving.share(take)

    def plain(self) -> dict[str, Any]:
        """The part of the state that belongs to no stage; it is the same on every rank."""
        return self._saving.plain()

    def would_hold(self, plain: dict[str, Any]) -> list[int] | None:
        """The stages whose tensors this process needs from a state with these plain values; None: all."""
        return self._saving.would_hold(plain)

    @property
    def ranks(self) -> Ranks | SingleProcess:
        """The processes that share the pipeline."""
        return self._engine.ranks

    @property
    def stages(self) -> int:
        """How many stages the model has."""
        return len(self._engine.stages)

    @property
    def owner(self) -> list[int]:
        """The worker of each stage, by number."""
        return self._engine.owner

    @property
    def held(self) -> list[tuple[int, int]]:
        """(stage, replica) of all stages that this process holds."""
        return [(stage.index, stage.replica) for stage in self._engine.holding.mine]

    @property
    def streamed(self) -> bool:
        """Whether weights live in a store."""
        return self._engine.holding.store is not None

    @property
    def vectorized(self) -> dict[str, str]:
        """With vectorize=: for each run of similar stages, whether they run as one; known from the first push on."""
        return self._engine.vectorized

    @property
    def unsplit(self) -> dict[str, str]:
        """Where the schedule splits backwards: of each stage here whose last one was done at once, what kept it so."""
        return self._inspection.unsplit()

    @property
    def arrived(self) -> int:
        """Micro-batches pushed so far. After resuming from a store's folder, those that its last version has seen."""
        self._engine.progress.ask()
        return self._engine.arrived

    @property
    def in_flight(self) -> list[int]:
        """Micro-batches of which each stage has done F and not B. With workers, call `wait` before."""
        return self._inspection.in_flight()

    @property
    def pushes(self) -> int:
        """Pushes so far, those of a loaded state included: `for step in range(pipe.pushes, steps)` goes on after it."""
        self._engine.progress.ask()
        return self._engine.progress.pushes

    @property
    def ledger(self) -> Sequence[Record]:
        """Records (stage, kind, mb, version) of the last million F and B of each worker here, for the first replica."""
        return self._inspection.ledger()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline is not copied or pickled, since autograd's graphs of what is in flight cannot be; save "
            "pipe.state_dict(), or pipeback.checkpoint.save, and load it into a new Pipeline"
        )

    def __repr__(self) -> str:
        return self._inspection.text()

    def _repr_html_(self) -> str:
        return self._inspection.html()

    def draw(self, micro_batches: int | None = None) -> Drawing:
        """A picture of what runs when, for a notebook; needs matplotlib. None: two per stage and four more."""
        return self._inspection.draw(micro_batches)

    def memory(self) -> Memory:
        """Bytes of weights, copies of weights, method state and activations, measured on the stages of this rank."""
        return self._inspection.memory()

    def expert_load(self) -> dict[str, ExpertLoad]:
        """Tokens per expert since the start, and dropped ones, by path of each block here whose experts are spread."""
        return self._inspection.expert_load()

    def traffic(self) -> Traffic:
        """The streaming of this rank's stages since the first push: bytes, fetches, seconds that computing waited."""
        return self._inspection.traffic()

    def plan(
        self, x: Value = None, y: Any = None, *, pushes: int | None = None, expected: int = 1, device: Any = None
    ) -> pipeback.Plan:
        """A `Plan` of training, to be printed: bytes on device, host and disk, passes, waiting, batch window.

        x, y: a push, which is rehearsed and not trained on; None: like the last one. expected: micro-batches until the
        next `step`, if the loss is computed outside. pushes: how many to average over; None: the steady state. device:
        "H100", one of the planner's that is not here. Over processes it is about this rank; all make the first one.
        """
        return self._inspection.plan(x, y, pushes, expected, device)

    def breakdown(self, x: Value, y: Any = None, *, repeats: int = 0) -> Breakdown:
        """A `StageRow` per stage: its layers, parameters, FLOPs, seconds, activations and delay.

        x, y: a push, of which one micro-batch is rehearsed, in one process. repeats: of F and B, for a median; 0: none.
        """
        return self._inspection.breakdown(x, y, repeats)

    def record(self, on: bool = True) -> None:
        """Measure every operation from now on, one at a time, for `pipeback.draw.trace`. Every rank calls it."""
        self._inspection.record(on)

    @property
    def recorded(self) -> Recording:
        """What `record` measured: a `Slot` per operation of all ranks, in seconds on one clock. Every rank calls it."""
        return self._inspection.recorded()

    def watch(self, on: bool = True) -> Watch:
        """Follow micro-batches through this rank's stages from now on, which takes one more copy of their weights."""
        return self._inspection.watch(on)
