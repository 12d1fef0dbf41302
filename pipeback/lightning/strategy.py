"""PipelineStrategy trains an unchanged LightningModule by pipelined backpropagation.

A stage does three things with a micro-batch: F (forward), B (backward) and U (update). They run in hooks of Lightning:

    training_step calls the model   F of the micro-batch at every stage; the loss is computed outside the pipeline
    backward                        B at every stage that may run it now
    optimizer_step                  U at every stage for which it is due

So every hook, log and closure of Lightning keeps its meaning. Only `lightning_internals` uses private parts of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pipeback.lightning import find_stages, lightning_internals, one_by_one, option_checks
from pipeback.lightning.fit import Fit
from pipeback.lightning.fit_state import KEY, FitState
from pipeback.lightning.one_device import OneDevice
from pipeback.lightning.ranks.place import Place
from pipeback.lightning.ranks.rank_sync import RankSync
from pipeback.lightning.ranks.shared_fit import SharedFit
from pipeback.lightning.resumed import Resumed
from pipeback.lightning.step_clipping import norm_and_value
from pipeback.lightning.strategy_options import StrategyOptions
from pipeback.lightning.streamed_model import StreamedModel, staying
from pipeback.methods.base import Method
from pipeback.pipeline.arguments import Debug, MicroBatches, Processes, Splitting, Streaming, TensorParallel
from pipeback.pipeline.pipeline import Pipeline
from pipeback.splitting.uncompiled import uncompiled
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import meta


class PipelineStrategy(Place):
    """Trains by pipelined backpropagation: on one device, or with Trainer(devices=N), each process with some stages.

    method            a name of `pipeback.methods.available()` or a `pipeback.Method`. None: "cerebras", or
                      "pipedream" if the optimizer is not momentum SGD
    micro_batch_size  None: a batch of the DataLoader is a micro-batch. n: the batch is cut into micro-batches of n
                      samples, and `training_step` runs once per micro-batch; hooks, steps and schedulers count batches
    reference_batch   the samples per update for which SGD's rate and momentum were chosen; stages step with them scaled
                      to their own updates (`pipeback.scale_hyperparameters`). None: as they are
    stages            "auto": in a sequence each module is a stage, otherwise each block or layer. "block", "layer",
                      "sublayer", a number, a list of names where a stage begins, or a `pipeback.Splitting`
    module            the name of the attribute that is trained. It may be a sequence of stages: an `nn.Sequential`, a
                      module with one as its body, or one with a method `pipeline_stages()`; any other is traced when
                      training_step first calls it. "self": all weights that training_step uses.
                      None: "model", or the only module with trained weights, if it has all; else "self"
    drain             "end": micro-batches in flight stay there until `fit` ends. "validation": until every validation
    workers           a number: so many threads share the stages of one device, and run B and U of different
                      micro-batches at once. With several devices, a `pipeback.Processes`: a rank that does not answer
                      for `timeout` seconds is given up; so is one that spends as long in its own code between batches
    store             where weights, gradients and optimizer state live. None: on the device. "host": in host memory.
                      "disk:FOLDER": in files (of rank r in FOLDER/rank-r). Or a `pipeback.Store` or `.Streaming`
    masters           with precision="bf16-true", the optimizers of the stages step float32 copies of the weights. Their
                      state, and the weights under "pipeback" in a checkpoint, are float32
    compile           True compiles the training forward of every stage with torch.compile; or a dict of its options
    debug             a `pipeback.Debug`: the order of operations, and what to do about functions of weights
    activations       what F leaves for B: "device", "recompute" or "host", or a list with one per stage, or a dict
    plan              with a store, log what training will hold, move and wait for, before the first micro-batch
    launcher          what starts several processes, if not torchrun or SLURM: "auto", "spawn", "fork" or "script"
    vectorize         stages that are alike run as one: "auto", where that is faster; True, wherever it can be;
                      "cuda_graph", also as CUDA graphs. Results differ in rounding; `vectorized` tells which do
    tensor_parallel   devices that compute each stage together, each with its shard of the weights; or a
                      `pipeback.TensorParallel`, whose plan has the paths of the module that is trained

    `accumulate_grad_batches` sets the update interval of methods that have one. `gradient_clip_val` clips the gradient
    of each stage by itself, since a norm over all stages would have to wait for the last. Backward hooks see the loss
    of the micro-batch undivided; gradients are divided once, by the true count. A checkpoint holds the micro-batches in
    flight under "pipeback". It opens in plain Lightning and, but for stages that ran as one, on any number of devices.

    Several devices give the same weights as one, bit for bit (with `tensor_parallel` within rounding). Every rank gets
    the same batches. Rank 0 runs `training_step` to its end; others run it up to the call of the model.

    A store gives the same weights as store=None, bit for bit. With a method that flushes (gpipe, one_f_one_b), all
    slices of a batch pass a stage while it is on the device: two passes over the weights per batch, with the
    activations of all slices at once. The `training_step` of a slice waits at its call of the model, in a thread; what
    it does before the call happens for all slices before anything after it. Validation, test and predict stream, too.
    Within fit, read weights in validation in `with strategy.pipeline.shown():` or from a checkpoint; else a stage shows
    what is on the device, or NaN. After fit they are in host memory. "pipeback_streaming": gpipe with store="host".

    With a store and one device, the stages may come from the meta device; each gets its values when it enters the
    store. With a disk store such a model may be larger than memory and returns to the meta device after fit: the
    callback `SaveWeights` saves its weights, and `Streaming(init=...)` loads them.

    Raises ValueError or TypeError, naming the option and the cure, before anything is trained.
    """

    strategy_name = "pipeback"

    def __init__(
        self,
        method: str | Method | None = None,
        micro_batch_size: int | MicroBatches | None = None,
        reference_batch: int | None = None,
        stages: str | int | Sequence[str] | Splitting = "auto",
        module: str | None = None,
        drain: str = "end",
        workers: int | Processes | None = None,
        store: str | Store | Streaming | None = None,
        activations: str | Sequence[str] | Mapping[str | int, str] = "device",
        masters: bool = False,
        compile: bool | dict[str, Any] = False,
        debug: Debug | None = None,
        plan: bool = True,
        launcher: str = "auto",
        vectorize: bool | str = False,
        tensor_parallel: int | TensorParallel = 1,
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        option_checks.no_unknown({**unknown, "micro_batch_size": micro_batch_size, "stages": stages, "store": store})
        self.options = StrategyOptions.checked(
            micro_batch_size, stages, workers, store, debug, tensor_parallel, method=method, module=module, drain=drain,
            reference_batch=reference_batch, activations=activations, masters=masters, compile=compile, plan=plan,
            vectorize=vectorize,
        )  # fmt: skip
        super().__init__(
            launcher, self.options.processes, self.options.tensor, accelerator, checkpoint_io, precision_plugin
        )
        self.tell = cast(Callable[[str], None], rank_zero_info)  # shows the plan
        self._visits: StreamedModel | None = None
        self._fit: Fit | None = None
        self._state: FitState | None = None  # of this fit
        self._together: RankSync | None = None
        self._resumed = Resumed()

    def __repr__(self) -> str:
        o, note = self.options, ""
        if "pytorch_lightning" in sys.modules:  # whose Trainer shows this in its error
            note = ", which is for lightning.pytorch, not for pytorch_lightning"
        given = f"method={o.method!r}, micro_batch_size={o.micro_batch_size}, stages={o.splitting.stages!r}"
        return f"PipelineStrategy({given}){note}"

    @property
    def built(self) -> bool:
        """Whether the pipeline has been built: at the beginning of `fit`, or at its first batch."""
        return self._fit is not None and self._fit.pipe is not None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that `fit` trains; it exists from the first training batch on, at the latest."""
        if self._fit is None or self._fit.pipe is None:
            gone = "; with several devices it is in the processes that fit starts" if self.launcher else ""
            raise RuntimeError(f"there is no pipeline yet; it is built when fit begins{gone}")
        return self._fit.pipe

    @property
    def vectorized(self) -> dict[str, str]:
        """With vectorize=: which stages run as one, and why others do not; what stands for `training_step`."""
        return {} if self._fit is None else self._fit.vectorized

    @property
    def busy(self) -> float:  # seconds in F, B and U since the beginning of `fit`
        return 0.0 if self._fit is None else self._fit.busy

    # -- building ------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        uncompiled(lightning_internals.as_written(model), type(model).__name__)  # a checkpoint has names without it
        super().connect(model)

    def setup(self, trainer: Trainer) -> None:
        self._fit, self._state, self._resumed = None, None, Resumed()
        fitting, module, options = trainer.state.fn == TrainerFn.FITTING, self.lightning_module, self.options
        assert module is not None
        store = option_checks.store(options.store) if fitting else None
        if fitting:
            found = options.find_to_fit(trainer, module, self.precision_plugin, self.ranks)
        super().setup(trainer)
        if options.streams(self.ranks) and (fitting or self.root_device.type != "cpu"):
            self._visits = StreamedModel(found if fitting else options.find(module, self.ranks), self.root_device)
        if fitting:
            (optimizer,) = self.optimizers
            find_stages.check_outside(module, found, optimizer)
            self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
            tell = None if isinstance(store, DeviceStore | None) or not options.plan else self.tell
            rank: OneDevice | SharedFit = OneDevice(found, options.threads)
            if self.meeting is not None:
                self.same_random_numbers()
                facts = options.facts(self.precision_plugin.precision)
                shards = self.parallelized.plan(options.tensor, found)
                rank = SharedFit(self.meeting, self.processes, facts, module, found, optimizer, shards)
            apart = one_by_one.why(options, trainer, module, found, self.ranks)
            self._fit = Fit(rank, module, found, optimizer, options, store, self._visits, tell, apart)
            self._state = FitState(self._fit, rank)
            if self.meeting is not None:
                self._together = RankSync(self.meeting, self.same_random_numbers)
                self._together.begin(trainer)

    def check_before_launch(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if not is_overridden("configure_model", module):
            self.options.find_to_fit(trainer, module, self.precision_plugin, self.ranks)

    def model_to_device(self) -> None:
        """Move the module to the device, except stages that live in a store."""
        module = self.lightning_module
        assert module is not None
        found = self.options.find(module, self.ranks) if self.options.streams(self.ranks) else None
        with nullcontext() if found is None or found.step is not None else staying(found.module):
            super().model_to_device()

    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            raise ValueError(f"configure_optimizers: {error} {option_checks.ONE}") from error
        option_checks.optimizers(self.optimizers)

    # -- a training step -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        fit, module = self._fit, self.lightning_module
        assert fit is not None and module is not None
        if lightning_internals.forward_only(module.trainer):
            fit.averaged = True
            return super().training_step(*args, **kwargs)
        return fit.training_step(super().training_step, args[0], args[1:], kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        fit, module, precision = self._fit, self.lightning_module, self.precision_plugin
        assert fit is not None and module is not None
        loss = fit.before_backward(closure_loss)
        self.pre_backward(loss)
        with fit.hooks.last():
            loss = precision.pre_backward(loss, module)
            precision.backward(loss, module, optimizer, *args, **kwargs)  # as far as the model's output
        fit.backward()  # through the stages, so that on_after_backward sees their gradients
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which runs F and B; then U at every stage for which it is due."""
        assert self._fit is not None and self._state is not None
        with self._state.stepping():
            return super().optimizer_step(optimizer, self._fit.hooks.completed(closure, self._fit), model, **kwargs)

    def _clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip as `configure_gradient_clipping` asks for, per stage."""
        if self._fit is not None:
            self._fit.clip(*norm_and_value(clip_val, gradient_clip_algorithm))

    # -- waiting and draining ------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        self._resumed.begin()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._state is not None:
            self._state.begin_validation()

    def on_validation_end(self) -> None:
        if self._state is not None:
            self._state.end_validation()
        super().on_validation_end()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._state is not None:
            self._state.end()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.fail(exception)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on; from now on it runs alone."""
        rank = None if self._state is None else self._state.rank
        option_checks.explain(error)
        if isinstance(rank, SharedFit) and not rank.failed:
            rank.fail(error)
        self.meeting = None

    def end_training(self) -> None:
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if self._together is not None:
            self._together.finish()
            self._together = None
        try:
            if self._state is not None:
                self._state.leave()
        finally:
            if self._visits is not None:
                self._visits.end()
                self._visits = None
        self.lost = self.lightning_module is not None and meta.absent(self.lightning_module)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state is None:
            return super().lightning_module_state_dict()
        with self._state.whole():
            return self._state.kept(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._state is None or not self.built:
            return super().optimizer_state(optimizer)
        return self._state.optimizer_state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        state = self._state
        if state is not None and state.lost and isinstance(state.rank, SharedFit):
            warnings.warn(f"{filepath} is not written: the weights of other ranks are lost", stacklevel=2)
            return
        if state is not None:
            state.put_into(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        if module is not None and meta.absent(module):  # values copied to the meta device would be lost
            module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=True)
            return
        with nullcontext() if self._state is None else self._state.shown(changes=True):
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        state, module, section = self._state, self.lightning_module, checkpoint.get(KEY)
        assert state is not None and module is not None
        state.load(section)
        self._resumed = Resumed(section, module.trainer)

    def before_reading(self, dataloader: Any) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training:
            self._resumed.at_end_of_epoch(dataloader)
