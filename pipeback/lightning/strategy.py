"""PipelineStrategy: a LightningModule trained by pipelined backpropagation, unchanged.

    training_step calls the model   F of a micro-batch at every stage; the loss is computed outside the pipeline
    backward                        B, wherever it may be done now
    optimizer_step                  U

so that every hook, log and closure of Lightning keeps its meaning. It uses the public API of Lightning
only, but for `lightning_internals`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from pipeback import sparsities
from pipeback.lightning import find_stages, lightning_internals, option_checks, random_state
from pipeback.lightning.call_override import stepping
from pipeback.lightning.fit import norm_and_value
from pipeback.lightning.lasting import KEY, Lasting
from pipeback.lightning.ranks.place import Place
from pipeback.lightning.ranks.rank_sync import RankSync
from pipeback.lightning.ranks.shared_fit import SharedFit
from pipeback.lightning.streamed_model import StreamedModel, staying
from pipeback.lightning.update_interval import UpdateInterval
from pipeback.methods.base import Method
from pipeback.pipeline.pipeline import Pipeline
from pipeback.sparsities.base import Sparsity
from pipeback.splitting.cut_points import Cuts
from pipeback.streaming import disk_store
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import meta


class PipelineStrategy(Place):
    """Pipelined backpropagation: on one device, or on Trainer(devices=N), where every process holds some stages.

    method            a name of `pipeback.methods.available()` or a `pipeback.Method`
    micro_batch_size  None: a batch of the DataLoader is a micro-batch. n: the batch is cut into micro-batches of n
                      samples, and `training_step` runs once on each; hooks, steps and schedulers count batches
    stages            "auto": of a sequence every module, else every block or layer. "block", "layer", "sublayer". n: so
                      many stages, neighbours joined. A list of names: a stage begins where each module is called
    module            the name of the LightningModule's module that is trained. A sequence of stages is an
                      `nn.Sequential`, a module with such a body, or one with a method `pipeline_stages()`. Of any other
                      the forward is followed when training_step calls it first, with whatever arguments it takes, and
                      cut into stages
    drain             "end": what is in flight stays so until the end of `fit`. "validation": it is finished before
                      every validation, and the pipeline fills anew after it
    store             where weights, gradients and the optimizer's state live: None: on the device; "host": in host
                      memory, and a stage's weights come to the device when they are needed; "disk:FOLDER": in files
                      (of rank r in FOLDER/rank-r); or a `pipeback.streaming.store.Store` with its options
    sparsity          most weights are zero: a name of `pipeback.sparsities.available()` or a `pipeback.Sparsity`
    skip_zeros        with sparsity: linear layers do not compute the zeros either; "auto": where that is faster
    masters           with precision="bf16-true": weights are stepped as float32 copies; F and B run on these, rounded.
                      `configure_optimizers` gives an optimizer over the bfloat16 parameters; each stage's steps the
                      float32 ones, so that what it keeps, also in a checkpoint's "optimizer_states", is float32. The
                      checkpoint holds the weights twice, rounded for others, and as they are under "pipeback"
    compile           every stage's forward in training through torch.compile, or a dict of its options
    activations       "device": kept for the backward; "recompute": from a stage's input; "host": in host memory; or a
                      list of these, one a stage, or {stage's name or number: kind}
    init              gives stages from the meta device their values: a function of the module, or the path of
                      safetensors; None: `reset_parameters` of their layers
    plan              with a store, log what training will hold, move and wait for, before the first micro-batch
    launcher          with several devices, who starts their processes, unless torchrun or SLURM has: "auto", "spawn",
                      "fork" or "script" (see `pipeback.lightning.ranks.launchers`)
    timeout           seconds after which a rank that does not answer is given up, and every other one raises a
                      `RankError`; a rank in code of its own between two batches has as long
    leaves            names of modules that are not looked into when the forward is followed

    `accumulate_grad_batches` sets the update interval of methods that have one, `gradient_clip_val` clips the gradient
    of each stage for itself (a norm over all stages would have to wait for the last). Backward hooks see the loss of
    the micro-batch undivided; gradients are divided once, by the true count. A checkpoint holds what is in flight
    under the key "pipeback" and opens in plain Lightning, too, and on any number of devices.

    With several devices the weights are those of one, bit for bit. Every rank gets the same batches; rank 0 has the
    loss and runs `training_step` to its end, the others as far as the call of the model.

    With a store the weights are those of store=None, bit for bit. Where a method flushes (gpipe), all slices of a batch
    go forward through a stage before it leaves, and backward likewise: two passes over the weights a batch (and
    all their activations at once, of one_f_one_b too). The
    `training_step` of a slice then waits where it calls the model, in a thread of its own, until the others have come
    there: what it draws or opens before that call happens for all slices before what comes after the call.
    Validation, test and predict stream, too. Within fit, read weights in validation hooks or from a checkpoint: in
    between, the parameters of a stage show what lies on the device, or NaN. After fit the module has them in host
    memory. `Trainer(strategy="pipeback_streaming")` is method="gpipe", store="host".

    With a store and one device the stages may come from the meta device (build the model in `torch.device("meta")`);
    each gets its values when the store takes it in. With a disk store such a model may be larger than memory: it goes
    back to the meta device after fit: the callback `SaveWeights` keeps its weights, `init` begins with them.

    Raises ValueError or TypeError, naming the option and the cure, before anything is trained.
    """

    strategy_name = "pipeback"

    def __init__(
        self,
        method: str | Method = "cerebras",
        micro_batch_size: int | None = None,
        stages: Cuts = "auto",
        module: str = "model",
        drain: str = "end",
        store: str | Store | None = None,
        sparsity: str | Sparsity | None = None,
        skip_zeros: bool | Literal["auto"] = False,
        masters: bool = False,
        compile: bool | dict[str, Any] = False,
        activations: str | Sequence[str] | Mapping[str | int, str] = "device",
        init: Callable[[nn.Module], object] | str | Path | None = None,
        plan: bool = True,
        launcher: str = "auto",
        timeout: float = 30.0,
        leaves: Sequence[str] = (),
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        option_checks.no_unknown(unknown)
        super().__init__(launcher, timeout, accelerator, checkpoint_io, precision_plugin)
        option_checks.options(method, micro_batch_size, drain)
        self.method, self.micro_batch_size, self.module = method, micro_batch_size, module
        self.stages, self.leaves = stages, tuple(leaves)
        option_checks.store(store)
        self.drain_at, self.store = drain, None if store == "device" else store
        if sparsity is not None and self.store is None:
            self.store = DeviceStore()
        self.more = {
            "sparsity": sparsities.create(sparsity) if isinstance(sparsity, str) else sparsity,
            "skip_zeros": skip_zeros,
            "masters": masters,
            "compile": compile,
            "activations": activations,
            "init": init,
        }
        option_checks.masters(masters, disk_store.create(self.store))
        self.plan, self.tell = plan, cast(Callable[[str], None], rank_zero_info)
        self._visits: StreamedModel | None = None
        self._fit: Lasting | None = None
        self._together: RankSync | None = None
        self._draws: dict[str, Any] | None = None  # random state to restore when the interrupted epoch has begun
        self._loader_states: list[Any] = []  # of the training loaders, when fit begins between epochs

    def __repr__(self) -> str:
        # what the Trainer of the other distribution shows when it is given one
        options = f"method={self.method!r}, micro_batch_size={self.micro_batch_size}, stages={self.stages!r}"
        return f"PipelineStrategy({options}), which is for lightning.pytorch, not for pytorch_lightning"

    @property
    def built(self) -> bool:
        """Whether there is a pipeline: from the beginning of `fit`, or from its first batch on."""
        return self._fit is not None and self._fit.pipe is not None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that `fit` trains; there is one from the first training batch on."""
        if self._fit is None or self._fit.pipe is None:
            gone = "; with several devices it is in the processes that fit starts" if self.launcher else ""
            raise RuntimeError(f"there is no pipeline yet; it is built when fit begins{gone}")
        return self._fit.pipe

    @property
    def busy(self) -> float:
        """Seconds spent in F, B and U since the beginning of `fit`."""
        return 0.0 if self._fit is None else self._fit.busy

    # -- building ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        self._fit, self._draws, self._loader_states = None, None, []
        fitting, module = trainer.state.fn == TrainerFn.FITTING, self.lightning_module
        assert module is not None
        store = option_checks.store(self.store, self.global_rank, self.ranks) if fitting else None
        if fitting:
            found = self._checked(trainer, module)
        super().setup(trainer)
        if self._keeps_home and (fitting or self.root_device.type != "cpu"):
            self._visits = StreamedModel(self._find(module), self.root_device)
        if fitting:
            (optimizer,) = self.optimizers
            find_stages.check_outside(module, found, optimizer)
            self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
            check = partial(option_checks.precision, self.precision_plugin)
            size, interval = self.micro_batch_size, UpdateInterval(self.method)
            tell = self.tell if self.plan and not isinstance(store, DeviceStore | None) else None
            given = module, found, optimizer, interval, size, check, store, self._visits, self.more, tell
            if self.meeting is None:
                self._fit = Lasting(*given)
            else:
                self.same_random_numbers()
                self._fit = SharedFit(self.meeting, self.timeout, self._facts(), *given)
                self._together = RankSync(self._fit.meeting, self.same_random_numbers)
                self._together.begin(trainer)

    def _find(self, module: LightningModule) -> find_stages.TrainedModule:
        found = find_stages.find(module, self.module, self.stages, self.leaves)
        if self.several and not found.followed and len(found.stages) < self.ranks:
            raise ValueError(find_stages.few(found.name, len(found.stages), self.ranks))
        return found

    def _checked(self, trainer: Trainer, module: LightningModule) -> find_stages.TrainedModule:
        option_checks.trainer(trainer, module, self.precision_plugin, self.several, self.store is not None)
        found = self._find(module)
        option_checks.absent(trainer, found, self.more["init"], disk_store.create(self.store), self.several)
        return found

    def check_before_launch(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if not is_overridden("configure_model", module):
            self._checked(trainer, module)

    def model_to_device(self) -> None:
        """The module, but for stages that live in a store."""
        module = self.lightning_module
        assert module is not None
        with staying(self._find(module).module) if self._keeps_home else nullcontext():
            super().model_to_device()

    @property
    def _keeps_home(self) -> bool:
        """Whether the stages stay in host memory all the time. Over several devices each takes its own from its device:
        the first micro-batch is rehearsed where it will be computed.
        """
        return self.store is not None and not self.several

    def _facts(self) -> dict[str, Any]:
        """What all ranks must have been given alike, and the pipeline does not know."""
        names = ("method", "micro_batch_size", "module", "drain_at", "timeout")
        facts = {name.removesuffix("_at"): getattr(self, name) for name in names}
        store = disk_store.create(self.store)
        where = None if store is None else (type(store).__name__, store.prefetch, store.fused)
        return {**facts, "method": repr(self.method), "store": where, "precision": self.precision_plugin.precision}

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
        # Lightning divides the loss by accumulate_grad_batches; the pipeline divides the sum once, by the true count
        undivided = fit.before_backward()
        loss = closure_loss if undivided is None else undivided
        self.pre_backward(loss)
        loss = precision.pre_backward(loss, module)
        precision.backward(loss, module, optimizer, *args, **kwargs)  # through the loss, as far as the model's output
        fit.backward()  # through the stages, so that on_after_backward sees their gradients
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure, with F and B within; then U at every stage where it is due.

        The user's optimizer steps, too, while no parameter has a gradient: no weight moves, but its hooks, profilers
        and schedulers see the step they wait for.
        """
        with nullcontext() if self._fit is None else stepping(optimizer, self._fit.step):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """What `configure_gradient_clipping` asks for, at every stage for itself, with the updates that follow."""
        if self._fit is not None:
            self._fit.clip(*norm_and_value(clip_val, gradient_clip_algorithm))

    # -- quiet moments -------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._draws is not None:  # making the loader's iterator has drawn from it since
            random_state.load(self._draws)
            self._draws = None

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._fit is None:
            return
        if self.drain_at == "validation":
            self._fit.drain()
        else:
            with self._fit.quiet():
                pass

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._fit is not None:
            self._fit.end()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.fail(exception)

    def fail(self, error: BaseException) -> None:
        """Have the other ranks know that this one cannot go on; from now on it is alone."""
        if isinstance(self._fit, SharedFit) and not self._fit.failed:
            option_checks.explain(error)
            self._fit.fail(error)
        self.meeting = None

    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if self._together is not None:
            self._together.finish()
            self._together = None
        try:
            if self._fit is not None:
                self._fit.leave()
        finally:
            if self._visits is not None:
                self._visits.end()
                self._visits = None
        self.lost = self.lightning_module is not None and meta.absent(self.lightning_module)
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._fit is None:
            return super().lightning_module_state_dict()
        with self._fit.whole():
            return self._fit.kept(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._fit is None or self._fit.pipe is None:
            return super().optimizer_state(optimizer)
        return self._fit.optimizer_state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        fit = self._fit
        if fit is not None and fit.lost and isinstance(fit, SharedFit):
            warnings.warn(f"{filepath} is not written: the weights of other ranks are lost", stacklevel=2)
            return
        if fit is not None:
            fit.put_into(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if meta.absent(module):  # what is copied there is lost
            module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=True)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        fit, module, section = self._fit, self.lightning_module, checkpoint.get(KEY)
        assert fit is not None and module is not None
        fit.load(section)
        if section is None:
            warnings.warn(
                "the checkpoint was not made by the pipeback strategy (or by one that had failed): weights and "
                "optimizer go on from it, the pipeline fills anew",
                stacklevel=2,
            )
        elif section["mid_epoch"]:
            self._draws = section["random"]
        else:
            self._loader_states = lightning_internals.take_loader_states(module.trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        # Between epochs Lightning gives a loader no state, or one that stands at the end of its epoch. A sampler with a
        # generator of its own needs it: an iterator that stands at the end is made, and the next is the next epoch's.
        assert self.lightning_module is not None
        if self._loader_states and self.lightning_module.trainer.training:
            state = self._loader_states.pop(0)
            if state and hasattr(dataloader, "load_state_dict"):
                draws = random_state.save()
                dataloader.load_state_dict(state)
                iter(dataloader)
                random_state.load(draws)
        return super().process_dataloader(dataloader)
