"""PipelineStrategy: a LightningModule trained by pipelined backpropagation, unchanged.

    training_step calls the model   F of a micro-batch at every stage; the loss is computed outside the pipeline
    backward                        B, wherever it may be done now
    optimizer_step                  U

so that every hook, log and closure of Lightning keeps its meaning. Public Lightning API only, but for `private`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from pipeback import methods
from pipeback.lightning import body, private, randomness
from pipeback.lightning.fit import Fit, norm_and_value
from pipeback.lightning.interval import Interval
from pipeback.method import Method
from pipeback.pipeline import Pipeline

KEY = "pipeback"  # of a checkpoint
DRAIN = ("end", "validation")


class PipelineStrategy(SingleDeviceStrategy):
    """Pipelined backpropagation on one device: all stages live in this process.

    method            a name of `pipeback.methods.available()` or a `pipeback.Method`
    micro_batch_size  None: a batch of the DataLoader is a micro-batch. n: the batch is cut into micro-batches of n
                      samples, and `training_step` runs once on each; hooks, steps and schedulers count batches
    stages            "auto": every module of the sequence is a stage. n: so many stages, neighbours joined
    module            the name of the LightningModule's module that is the sequence of stages: an `nn.Sequential`, a
                      module with such a body, or one with a method `pipeline_stages()`
    drain             "end": what is in flight stays so until the end of `fit`. "validation": it is finished before
                      every validation, and the pipeline fills anew after it

    `accumulate_grad_batches` sets the update interval of methods that have one, `gradient_clip_val` clips the gradient
    of each stage for itself (a norm over all stages would have to wait for the last). Backward hooks see the loss of
    the micro-batch undivided; gradients are divided once, by the true count. A checkpoint holds what is in flight
    under the key "pipeback" and opens in plain Lightning, too.

    Raises ValueError or TypeError, naming the option and the cure, before anything is trained.
    """

    strategy_name = "pipeback"

    def __init__(
        self,
        method: str | Method = "cerebras",
        micro_batch_size: int | None = None,
        stages: str | int = "auto",
        module: str = "model",
        drain: str = "end",
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        _check_options(unknown)
        if isinstance(method, str) and method not in methods.available():
            near = get_close_matches(method, methods.available(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown method {method!r}{hint}; there are {', '.join(methods.available())}")
        if not isinstance(method, (str, Method)):
            raise TypeError(f"method must be a name or a pipeback.Method, but is {type(method).__name__}")
        size = micro_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"micro_batch_size must be a whole number of at least 1 or None, but is {size!r}")
        if drain not in DRAIN:
            raise ValueError(f"drain must be one of {', '.join(DRAIN)}, but is {drain!r}")
        self.method, self.micro_batch_size, self.stages, self.module = method, size, stages, module
        self.drain_at = drain
        self._devices: list[torch.device] = []
        self._fit: Fit | None = None
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
            raise RuntimeError("there is no pipeline yet; it is built when fit begins")
        return self._fit.pipe

    @property
    def busy(self) -> float:
        """Seconds spent in F, B and U since the beginning of `fit`."""
        return 0.0 if self._fit is None else self._fit.busy

    # -- where it runs -------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Set by the Trainer from its options accelerator and devices."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ValueError(
                f"Trainer(devices={len(devices)}): the stages of the pipeback strategy live in one process, on one "
                "device; use devices=1"
            )
        self._devices = list(devices)

    # -- building ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        self._fit, self._draws, self._loader_states = None, None, []
        fitting, module = trainer.state.fn == TrainerFn.FITTING, self.lightning_module
        assert module is not None
        if fitting:
            self._check_trainer()
            found = body.find(module, self.module, self.stages)
        super().setup(trainer)
        if fitting:
            (optimizer,) = self.optimizers
            body.check_outside(module, found, optimizer)
            self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
            check = self._check_precision
            self._fit = Fit(module, found, optimizer, Interval(self.method), self.micro_batch_size, check)

    def _check_trainer(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} uses manual optimization, but the pipeline decides when a stage steps; "
                "use automatic optimization: return the loss from training_step"
            )
        precision, name = self.precision_plugin, self.precision_plugin.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            raise ValueError(
                f'precision="{name}": loss scaling needs one step for all stages; use "bf16-true" or "32-true"'
            )
        if type(precision) not in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
            raise ValueError(
                f'precision="{name}" is not supported by pipeback; use "32-true", "bf16-true" or "64-true"'
            )

    def _check_precision(self, method: Method) -> None:
        precision = self.precision_plugin
        if isinstance(precision, MixedPrecision) and method.copies != "stash" and any(method.delays(8)):
            raise ValueError(
                f'precision="{precision.precision}": under autocast the graph keeps casts of the old weights, which '
                f'turns {method!r} into weight stashing silently; use precision="bf16-true" or "32-true", or '
                'method="pipedream"'
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            raise ValueError(f"configure_optimizers: {error} {_ONE}") from error
        if len(self.optimizers) != 1:
            raise ValueError(f"configure_optimizers returned {len(self.optimizers)} optimizers. {_ONE}")
        if isinstance(self.optimizers[0], torch.optim.LBFGS):
            raise ValueError(
                "configure_optimizers returned LBFGS, which evaluates the loss several times a step; a pipeline "
                "cannot; use SGD or Adam"
            )

    # -- a training step -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        fit, module = self._fit, self.lightning_module
        assert fit is not None and module is not None
        if private.forward_only(module.trainer):
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
        original, own = optimizer.step, optimizer.__dict__.get("step")

        def step(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            result = None if closure is None else closure()
            if self._fit is not None:
                self._fit.step()
            original(**more)
            return result

        step.__dict__.update(getattr(original, "__dict__", {}))  # what a scheduler has marked its wrapper with
        optimizer.step = step
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

    def _clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """What `configure_gradient_clipping` asks for, at every stage for itself, with the updates that follow."""
        if self.built:
            self.pipeline.clip(*norm_and_value(clip_val, gradient_clip_algorithm))

    # -- quiet moments -------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._draws is not None:  # making the loader's iterator has drawn from it since
            randomness.load(self._draws)
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

    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._fit is None:
            return super().lightning_module_state_dict()
        with self._fit.quiet():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._fit is None or self._fit.pipe is None:
            return super().optimizer_state(optimizer)
        return self._fit.twins.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        fit = self._fit
        if "optimizer_states" in checkpoint and fit is not None and fit.pipe is not None and not fit.averaged:
            if fit.pipe.closed:
                warnings.warn(
                    f"{filepath}: a stage has failed, so what was in flight is lost; the checkpoint holds the rest",
                    stacklevel=2,
                )
            else:
                checkpoint[KEY] = fit.section()
        super().save_checkpoint(checkpoint, filepath, storage_options)

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
            self._loader_states = private.take_loader_states(module.trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        # Between epochs Lightning gives a loader no state, or one that stands at the end of its epoch. A sampler with a
        # generator of its own needs it: an iterator that stands at the end is made, and the next is the next epoch's.
        assert self.lightning_module is not None
        if self._loader_states and self.lightning_module.trainer.training:
            state = self._loader_states.pop(0)
            if state and hasattr(dataloader, "load_state_dict"):
                draws = randomness.save()
                dataloader.load_state_dict(state)
                iter(dataloader)
                randomness.load(draws)
        return super().process_dataloader(dataloader)


_ONE = "pipeback trains with one optimizer: return one, with several parameter groups where rates differ"


def _check_options(unknown: Mapping[str, Any]) -> None:
    known = ("method", "micro_batch_size", "stages", "module", "drain")
    for name in unknown:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"PipelineStrategy has no option {name!r}{hint}; it takes {', '.join(known)}")
