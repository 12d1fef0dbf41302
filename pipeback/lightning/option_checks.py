"""Checks that refuse what a PipelineStrategy cannot do, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import getattr_static
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from pipeback import methods
from pipeback.counts import counted
from pipeback.lightning import lightning_internals
from pipeback.lightning.find_stages import TrainedModule
from pipeback.methods.base import Method
from pipeback.pipeline.arguments import Debug, MicroBatches, Processes, Splitting, Streaming, TensorParallel, where_else
from pipeback.pipeline.option_checks import check_masters, such
from pipeback.streaming import disk_store
from pipeback.streaming.committed import processes
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import meta

OPTIONS = (
    "method",
    "micro_batch_size",
    "reference_batch",
    "stages",
    "module",
    "drain",
    "workers",
    "store",
    "activations",
    "masters",
    "compile",
    "debug",
    "plan",
    "launcher",
    "vectorize",
    "tensor_parallel",
)
TRAINER = {  # arguments of a Pipeline that a Trainer decides
    "loss": "return it from training_step",
    "optimizer": "return it from configure_optimizers",
    "clip_norm": "use Trainer(gradient_clip_val=...)",
    "clip_value": 'use Trainer(gradient_clip_val=..., gradient_clip_algorithm="value")',
    "device": "use Trainer(accelerator=...)",
    "mesh": "use Trainer(devices=...)",
    "replicas": "a Trainer has one pipeline; use Trainer(devices=...), which has more workers, or a pipeback.Pipeline",
}
NEVER = 2**62  # micro-batches between commits
DRAIN = ("end", "validation")
VECTORIZE = (True, False, "auto", "cuda_graph")
ONE = "pipeback trains with one optimizer: return one, with several parameter groups if learning rates differ"


def no_unknown(given: Mapping[str, Any]) -> None:
    for name in given:
        if name in OPTIONS:
            continue
        near, place = get_close_matches(name, OPTIONS, n=1), where_else(name, given)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = f"; {TRAINER[name]}" if name in TRAINER else f"; give {place}" if place else hint
        raise TypeError(f"PipelineStrategy has no option {name!r}{hint}; it takes {', '.join(OPTIONS)}")


def options(method: str | Method | None, drain: str, vectorize: bool | str) -> None:
    if isinstance(method, str) and method not in methods.available():
        near = get_close_matches(method, methods.available(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {method!r}{hint}; there are {', '.join(methods.available())}")
    if not isinstance(method, (str, Method, type(None))):
        raise TypeError(f"method must be a name, a pipeback.Method or None, but is {type(method).__name__}")
    if not isinstance(vectorize, bool | str) or vectorize not in VECTORIZE:
        raise ValueError(f'vectorize must be True, False, "auto" or "cuda_graph", but is {vectorize!r}')
    if drain not in DRAIN:
        raise ValueError(f"drain must be one of {', '.join(DRAIN)}, but is {drain!r}")


def grouped(
    size: MicroBatches, cuts: Splitting, workers: Any, processes: Processes, streaming: Streaming, debug: Any,
    tensor: TensorParallel,
) -> None:  # fmt: skip
    """Raise if a long form has a field that the Trainer decides, or that `training_step` makes impossible."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise TypeError(
            f"workers must be a number of threads, a pipeback.Processes or None, but is {workers!r}; for example "
            "workers=2"
        )
    such("debug", debug, (Debug,), "a pipeback.Debug or None")
    for group in (size, cuts, processes, streaming, debug, tensor):
        group.check()
    for name, value, plain, cure in (
        ("weights", size.weights, "equal", 'micro_batch_size=pipeback.MicroBatches(weights="equal")'),
        ("mesh", processes.mesh, None, "Trainer(devices=...)"),
        ("device", streaming.device, None, "Trainer(accelerator=...)"),
        ("check_finite", debug.check_finite, False, "debug=pipeback.Debug(check_finite=False)"),
        ("take_back", debug.take_back, None, "debug=pipeback.Debug(take_back=None)"),
    ):
        if value != plain:
            raise ValueError(f"PipelineStrategy does not take {name}={value!r}; use {cure}")


def threads(workers: int | None, ranks: int) -> None:
    if workers is not None and ranks > 1:
        raise ValueError(
            f"workers={workers}: with several devices each has a process, which is a worker; leave workers out, or use "
            "Trainer(devices=1)"
        )


def mesh(tensor: TensorParallel, ranks: int) -> None:
    """Raise ValueError unless workers of so many ranks can be made of the devices."""
    size = tensor.size
    if ranks % size:
        raise ValueError(
            f"tensor_parallel={size} has {size} devices compute each stage together, but the Trainer has "
            f"{counted(ranks, 'device')}; use Trainer(devices={size}) or a multiple of it, or leave tensor_parallel out"
        )


def masters(given: Any, store: Store | None) -> None:
    try:
        check_masters(given, store)
    except ValueError as error:
        raise ValueError(f'{error} (precision="32-true")') from None


def store(given: str | Store | None) -> Store | None:
    """The store of a fit. A Trainer resumes from a checkpoint, so that a store on disk commits and resumes nothing."""
    found = disk_store.create(given)
    if not isinstance(found, DiskStore):
        return found
    if found.commit_every is not None:
        raise ValueError(
            f"store: DiskStore(commit_every={found.commit_every}) commits versions, from which a Trainer does not "
            "resume; leave commit_every out, and give fit a checkpoint (ckpt_path=...)"
        )
    if processes(found.folder):
        raise ValueError(
            f"store: {found.folder} holds a committed version of a pipeline, from which a Trainer does not resume; "
            "give fit a checkpoint (ckpt_path=...) and the store an empty folder"
        )
    return DiskStore(found.folder, found.prefetch, found.fused, NEVER, found.device_memory, found.host_memory)


def absent(trainer: Trainer, found: TrainedModule, init: Any, store: Store | None, several: bool) -> None:
    """Raise if stages on the meta device could not get values, or a callback would collect them in memory."""
    if not meta.absent(found.module):
        if init is not None:
            raise ValueError(
                f"init gives values to stages from the meta device, but self.{found.name} has its values; build it in "
                'torch.device("meta"), or leave init out'
            )
        return
    where = f"self.{found.name} is on the meta device"
    if several or store is None or isinstance(store, DeviceStore):
        raise ValueError(
            f'{where}, without values, which stages get on one device with store="host" or "disk:FOLDER"; '
            f"build it with its values, or use {'devices=1' if several else 'a store'}"
        )
    for callback in trainer.callbacks if isinstance(store, DiskStore) else ():  # type: ignore[attr-defined]
        if isinstance(callback, Checkpoint):
            raise ValueError(
                f"{where} and its weights in files, since memory may be too small, but {type(callback).__name__} "
                "collects all of them in memory: use enable_checkpointing=False, and pipeback.lightning.SaveWeights"
            )


def trainer(
    trainer: Trainer, module: LightningModule, plugin: Precision, several: bool, streamed: bool = False
) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization, but the pipeline decides when a stage steps; "
            "use automatic optimization: return the loss from training_step"
        )
    name = plugin.precision
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ValueError(
            f'precision="{name}": loss scaling needs one step for all stages; use "bf16-mixed", "bf16-true" or '
            '"32-true"'
        )
    if type(plugin) not in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
        raise ValueError(f'precision="{name}" is not supported by pipeback; use "32-true", "bf16-true" or "64-true"')
    for callback in trainer.callbacks if streamed else ():  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} reads and writes all weights of the model at once, which live in a store; "
                "leave it out, or use store=None"
            )
    if not several:
        return
    if lightning_internals.validates_by_the_clock(trainer):
        raise ValueError(
            "val_check_interval by the clock: with several devices each rank has a clock of its own; give a number of "
            "batches or a fraction of an epoch"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} needs the whole model in one process; leave it out, or use devices=1"
            )


def optimizers(found: Sequence[Any]) -> None:
    if len(found) != 1:
        raise ValueError(f"configure_optimizers returned {len(found)} optimizers. {ONE}")
    if isinstance(found[0], torch.optim.LBFGS):
        raise ValueError(
            "configure_optimizers returned LBFGS, which evaluates the loss several times per step; a pipeline "
            "cannot; use SGD or Adam"
        )
    if isinstance(getattr_static(found[0], "param_groups", None), property):
        name = type(found[0]).__name__
        raise ValueError(
            f"configure_optimizers returned {name}, which steps another optimizer inside of it, and of which no second "
            f"one can be made for each stage; return the optimizer inside, or use pipeback.Pipeline(optimizer=lambda "
            f"weights: {name}(...))"
        )


def has_values(module: LightningModule) -> None:
    """Raise ValueError if weights of several modules are on the meta device: `training_step` runs to be followed."""
    if not meta.absent(module):
        return
    names = [name for name, child in module.named_children() if any(p.requires_grad for p in child.parameters())]
    raise ValueError(
        f"{type(module).__name__} is on the meta device, without values, and its weights are in "
        f"{', '.join(f'self.{name}' for name in names) or 'itself'}; training_step is followed, for which it must "
        "run once: build it with its values; or write an nn.Module that holds them all and whose forward calls them, "
        "keep it as self.model, and call self.model in training_step"
    )


def explain(error: BaseException) -> None:
    """Add a note to an error of the pipeline that says what it means under Lightning."""
    if "is not the one that worker" in str(error):  # link.OtherBatch, which other ranks hear of in a RankError
        error.add_note(
            "Every rank of Trainer(devices=N) must see the same batches, as one device would: no DistributedSampler, "
            "no rank in the choice of data; and what training_step draws after it has called the model, the other "
            "ranks do not draw"
        )
    if "do not make the same calls" in str(error):
        error.add_note(
            "On the other ranks of Trainer(devices=N), training_step ends where it calls the model: an attribute that "
            "it sets afterwards stays as it was there; set what the forward reads before the call, or in a hook that "
            "does not look at the loss"
        )
    if "now that requires_grad is set" in str(error):  # as BackboneFinetuning does
        error.add_note(
            "A fit trains the weights that require a gradient when it begins: let it end before others are unfrozen "
            "(max_epochs), and go on with fit of another Trainer"
        )
    if "a leaf Variable that requires grad is being used in an in-place operation" in str(error):
        error.add_note(
            "The output of the model has no graph within training_step, which must not change it in place: write "
            "output = output + x for output += x, or have all of training_step followed: "
            'PipelineStrategy(module="self")'
        )
