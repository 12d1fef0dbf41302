"""PipelineStrategy: a LightningModule trained by pipelined backpropagation, unchanged.

    training_step calls the model   F of a micro-batch at every stage; the loss is computed outside the pipeline
    backward                        B, wherever it may be done now
    optimizer_step                  U

so that every hook, log and closure of Lightning keeps its meaning. Public Lightning API only, but for `private`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from pipeback.lightning import body, private, randomness, slices
from pipeback.lightning.interval import Interval
from pipeback.lightning.twins import Twins
from pipeback.method import Method
from pipeback.pipeline import Pipeline

KEY = "pipeback"  # of a checkpoint
KEPT = ("weight/", "buffer/", "optimizer/")  # what a checkpoint holds anyway: the model's state and the optimizer's
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
        self.busy = 0.0
        """Seconds spent in F, B and U since the beginning of `fit`."""
        self._devices: list[torch.device] = []
        self._pipe: Pipeline | None = None
        self._twins: Twins | None = None
        self._interval: Interval | None = None
        self._update = (1, 1)  # batches an update, and micro-batches a batch, that the pipeline was built for
        self._loss: Tensor | None = None  # what training_step returned
        self._output: Any = None  # of the model, cut from its graph; its gradient goes to the last stage
        self._sums: list[tuple[Tensor, Tensor]] = []  # gradients of groups under way, hidden from Lightning
        self._versions: list[int] = []  # of the parameters after the last step: a change is by someone else
        self._averaged = False  # a callback has put other weights in: what is in flight belongs to those before
        self._draws: dict[str, Any] | None = None  # random state to restore when the interrupted epoch has begun
        self._loader_states: list[Any] = []  # of the training loaders, when fit begins between epochs

    @property
    def built(self) -> bool:
        """Whether there is a pipeline: from the beginning of `fit`, or from its first batch on."""
        return self._pipe is not None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that `fit` trains; there is one from the first training batch on."""
        if self._pipe is None:
            raise RuntimeError("there is no pipeline yet; it is built when fit begins")
        return self._pipe

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
        self._pipe = self._twins = self._draws = self._output = None
        self._loader_states = []
        self.busy, self._averaged, self._sums = 0.0, False, []
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_trainer(trainer)
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        (optimizer,) = self.optimizers
        body.check_outside(self.lightning_module, self._found, optimizer)
        self._interval = Interval(self.method)
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
        if self._interval.known:
            self._build(trainer.accumulate_grad_batches, 1)

    def _check_trainer(self, trainer: Trainer) -> None:
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
        self._found = body.find(module, self.module, self.stages)
        self._chain_unknown = not isinstance(self._found.module, torch.nn.Sequential)
        self._depends_unknown = True

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

    def _build(self, batches: int, per_batch: int) -> None:
        """The pipeline over the stages that were found, for updates of so many batches and micro-batches a batch."""
        assert self._interval is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        method = self._interval.method(batches, per_batch)
        found = self._found
        precision = self.precision_plugin
        if isinstance(precision, MixedPrecision) and method.copies != "stash" and any(method.delays(len(found.stages))):
            raise ValueError(
                f'precision="{precision.precision}": under autocast the graph keeps casts of the old weights, which '
                f'turns {method!r} into weight stashing silently; use precision="bf16-true" or "32-true", or '
                'method="pipedream"'
            )
        twins = Twins(self.optimizers[0])
        as_written = isinstance(found.module, torch.nn.Sequential) and list(found.module) == found.stages
        whole = found.module if as_written else found.stages
        norm, value = _trainers_clip(trainer)
        self._pipe = Pipeline(whole, loss=None, optimizer=twins, method=method, clip_norm=norm, clip_value=value)
        self._twins, self._update = twins, (batches, per_batch)

    # -- a training step -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None and self._interval is not None
        trainer = module.trainer
        if private.forward_only(trainer):
            self._averaged = True
            return super().training_step(*args, **kwargs)
        self._fall()  # a micro-batch whose backward Lightning skipped
        batch, rest = args[0], args[1:]
        size = self.micro_batch_size
        cut = [(batch, 0)] if size is None else slices.cut(batch, size)
        if self._pipe is None:
            self._build(trainer.accumulate_grad_batches, len(cut))
        self._interval.check(trainer.accumulate_grad_batches)
        assert self._pipe is not None and self._twins is not None
        self._twins.follow()
        self._show_sums()
        expected = len(cut) * trainer.accumulate_grad_batches
        if len(cut) == 1:
            output = self._one(cut[0][0], rest, kwargs, expected)
        else:
            output = self._many(cut, rest, kwargs, expected)
        self._hide_sums()
        self._loss = output["loss"] if isinstance(output, Mapping) else output
        return output

    def _one(self, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], expected: int) -> Any:
        """`training_step` on one micro-batch, its F within."""
        self._output = None
        module = self._found.module
        original = module.forward
        plain = module.__dict__.get("forward")

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*inputs, **named)
            return self._forward(inputs, named, expected)

        module.forward = forward
        try:
            output = super().training_step(batch, *rest, **kwargs)
        finally:
            if plain is None:
                del module.forward
            else:
                module.forward = plain
        loss = output.get("loss") if isinstance(output, Mapping) else output
        name = self._found.name
        if self._output is None:
            raise ValueError(
                f"training_step did not call self.{name}, so there is nothing for the stages to learn from; call it "
                "once and compute the loss from its output"
            )
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step returned {'no loss' if loss is None else f'a {type(loss).__name__}'}, but the "
                "micro-batch has gone forward; return the loss, a 0-d tensor or a dictionary with it under 'loss' (to "
                "leave a batch out, return -1 from on_train_batch_start or take it out of the data)"
            )
        if self._depends_unknown:
            body.check_loss(self._found, loss, self._output)
            self._depends_unknown = False
        return output

    def _many(self, cut: list[tuple[Any, int]], rest: tuple[Any, ...], kwargs: dict[str, Any], expected: int) -> Any:
        """`training_step` on every slice; B and U of the last are left to Lightning's backward and optimizer_step."""
        assert self.lightning_module is not None
        log = slices.Log()
        losses: list[Tensor] = []
        with log.listening(self.lightning_module):
            for n, (batch, samples) in enumerate(cut):
                log.samples = samples
                output = self._one(batch, rest, kwargs, expected)
                loss = output["loss"] if isinstance(output, Mapping) else output
                losses.append(loss.detach())
                if n + 1 < len(cut):
                    loss.backward()
                    self._backward()
        mean = slices.mean(losses, [samples for _, samples in cut])
        passed = slices.Passed.apply(loss, mean)
        return {**output, "loss": passed} if isinstance(output, Mapping) else passed

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any], expected: int) -> Any:
        name = self._found.name
        if self._output is not None:
            raise ValueError(
                f"training_step called self.{name} twice; a micro-batch goes through the stages once: concatenate the "
                "inputs and call it once, or wrap a call that needs no gradient in torch.no_grad()"
            )
        if len(inputs) != 1 or named:
            raise TypeError(
                f"training_step called self.{name} with {len(inputs)} positional and {len(named)} named arguments; the "
                "first stage takes one tensor or a tuple of tensors: put them into one tuple"
            )
        parts = inputs[0] if isinstance(inputs[0], tuple) else inputs
        if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
            raise ValueError(
                f"the input of self.{name} requires a gradient, but what comes before it would get none; move the "
                f"layers before it into the first stage of {name!r}, or detach the input"
            )
        if self._chain_unknown:
            body.check_chain(self._found, inputs[0])
            self._chain_unknown = False
        with self._timed():
            self._output = self.pipeline.forward(inputs[0], expected=expected)
        return self._output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning divides the loss by accumulate_grad_batches; the pipeline divides the sum once, by the true count
        loss = closure_loss if self._loss is None else self._loss
        self._loss = None
        self._show_sums()
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(loss)
        loss = precision.pre_backward(loss, module)
        precision.backward(loss, module, optimizer, *args, **kwargs)  # through the loss, as far as the model's output
        self._backward()  # through the stages, so that on_after_backward sees their gradients
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _backward(self) -> None:
        """B, from the gradient of the model's output; without one the user's backward has skipped this micro-batch."""
        output, self._output = self._output, None
        if output is None:
            return
        gradient = tuple(part.grad for part in output) if isinstance(output, tuple) else output.grad
        if gradient is None or (isinstance(gradient, tuple) and all(part is None for part in gradient)):
            self.pipeline.forget()
            return
        with self._timed():
            self.pipeline.backward(gradient)

    def _fall(self) -> None:
        if self._output is not None:
            self._output = None
            self.pipeline.forget()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure, with F and B within; then U at every stage where it is due.

        The user's optimizer steps, too, while no parameter has a gradient: no weight moves, but its hooks, profilers
        and schedulers see the step they wait for.
        """
        original = optimizer.step

        def step(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            result = None if closure is None else closure()
            if self._pipe is not None:
                with self._timed():
                    self._pipe.step()
                self._versions = [p._version for p in self._found.module.parameters()]
            self._hide_sums()
            original(**more)
            return result

        before = optimizer.__dict__.get("step")
        step.__dict__.update(getattr(original, "__dict__", {}))  # what a scheduler has marked its wrapper with
        optimizer.step = step
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before

    def _clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """What `configure_gradient_clipping` asks for, at every stage for itself, with the updates that follow."""
        if self._pipe is not None:
            self._pipe.clip(*_norm_and_value(clip_val, gradient_clip_algorithm))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.busy += time.perf_counter() - begin

    # -- gradients of groups under way ---------------------------------------------------------------------------
    #
    # A stage that updates every k micro-batches sums its gradients where autograd puts them. Lightning clears the
    # gradients of all parameters at its own times, so the sums are put aside then; hooks after backward see them.

    def _hide_sums(self) -> None:
        for p in self._found.module.parameters():
            if p.grad is not None:
                self._sums.append((p, p.grad))
                p.grad = None

    def _show_sums(self) -> None:
        for p, grad in self._sums:
            p.grad = grad
        self._sums = []

    # -- quiet moments -------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._draws is not None:  # making the loader's iterator has drawn from it since
            randomness.load(self._draws)
            self._draws = None

    def on_validation_start(self) -> None:
        super().on_validation_start()
        with self._quiet():
            if self._pipe is not None and self.drain_at == "validation":
                self._pipe.drain()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._pipe is None:
            return
        if self._averaged or self._versions != [p._version for p in self._found.module.parameters()]:
            self._averaged = True
            warnings.warn(
                "a callback has put other weights into the model since the last step, as weight averaging does; what "
                "was still in flight was computed on those before and is not applied",
                stacklevel=2,
            )
        else:
            with self._quiet():
                self._pipe.drain()

    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        super().teardown()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Everything that may be done is; a micro-batch whose backward was skipped is forgotten."""
        if self._pipe is None or self._pipe.closed:
            yield
            return
        self._fall()
        self._show_sums()
        self._pipe.wait()
        yield
        self._hide_sums()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._quiet():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self._twins is None else self._twins.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint and self._pipe is not None and not self._averaged:
            if self._pipe.closed:
                warnings.warn(
                    f"{filepath}: a stage has failed, so what was in flight is lost; the checkpoint holds the rest",
                    stacklevel=2,
                )
            else:
                assert self.lightning_module is not None
                checkpoint[KEY] = self._section(private.mid_epoch(self.lightning_module.trainer))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _section(self, mid_epoch: bool) -> dict[str, Any]:
        """What a checkpoint lacks: micro-batches in flight, the method's state, random state."""
        with self._quiet():
            state = self.pipeline.state_dict()
        stages = [{k: v for k, v in tensors.items() if not k.startswith(KEPT)} for tensors in state["stages"]]
        return {
            "update": list(self._update),
            "mid_epoch": mid_epoch,
            "random": randomness.save(),
            "state": {**state, "stages": stages},
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.lightning_module is not None
        section = checkpoint.get(KEY)
        if self._pipe is None:
            if section is None:
                self._build(self.lightning_module.trainer.accumulate_grad_batches, 1)
            else:
                self._build(*section["update"])
        assert self._pipe is not None and self._twins is not None
        self._twins.give()
        if section is None:
            warnings.warn(
                "the checkpoint was not made by the pipeback strategy (or by one that had failed): weights and "
                "optimizer go on from it, the pipeline fills anew",
                stacklevel=2,
            )
            return
        # weights, buffers and optimizer state have been loaded where they live; the rest is put beside them
        here = self._pipe.state_dict()["stages"]
        stages = [
            {**{k: v for k, v in mine.items() if k.startswith(KEPT)}, **theirs}
            for mine, theirs in zip(here, section["state"]["stages"], strict=False)
        ] + section["state"]["stages"][len(here) :]
        self._pipe.load_state_dict({**section["state"], "stages": stages})
        self._twins.take()
        self._hide_sums()
        randomness.load(section["random"])
        self._draws = section["random"] if section["mid_epoch"] else None
        if not section["mid_epoch"]:
            self._loader_states = private.take_loader_states(self.lightning_module.trainer)

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


def _trainers_clip(trainer: Trainer) -> tuple[float | None, float | None]:
    return _norm_and_value(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


def _norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """What limits the norm, and what the single values, of a stage's gradient."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)


def _check_options(unknown: Mapping[str, Any]) -> None:
    known = ("method", "micro_batch_size", "stages", "module", "drain")
    for name in unknown:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"PipelineStrategy has no option {name!r}{hint}; it takes {', '.join(known)}")
