"""Arguments with a long form: a frozen value object holds the options that belong together.

    Pipeline(model, …, micro_batch_size=8)                                               the short form
    Pipeline(model, …, micro_batch_size=pipeback.MicroBatches(8, weights="samples"))     the long form

The short form of an argument is the first field of its long form. `Processes` and `Debug` have no short form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeback.pipeline.option_checks import above_zero, at_least_one, one_of, such
from pipeback.schedules.order import POLICIES
from pipeback.sparsities.base import Sparsity
from pipeback.stages.judged_output import OWN_LOSS
from pipeback.streaming.store import Store

P = ParamSpec("P")


@dataclass(frozen=True)
class MicroBatches:
    """How a push is cut into micro-batches: `Pipeline(micro_batch_size=...)`.

    size     samples per micro-batch; the last one of a push may have fewer. None: each push is one micro-batch
    weights  how micro-batches are weighted in the mean over an update. "equal": all alike, short ones too; "samples":
             each by its number of samples
    """

    size: int | None = None
    weights: Literal["equal", "samples"] = "equal"

    def check(self) -> None:
        """Raise ValueError if a field has a value that it cannot take."""
        at_least_one("micro_batch_size", self.size)
        one_of("weights", self.weights, ("equal", "samples"), "micro_batch_size=pipeback.MicroBatches")


@dataclass(frozen=True)
class Splitting:
    """Where the model is cut into stages: `Pipeline(stages=...)`.

    stages   of a model whose forward is traced: "block" cuts at its blocks; "layer" makes one stage per layer with
             weights, together with what follows it; "sublayer" does the same but gives norms stages of their own; a
             number says how many stages there are; a list names the modules at which stages begin; "auto" is "block"
             where the model has blocks, else "layer". Of a sequence: "auto" makes one stage per module, and a number
             says into how many stages neighbouring modules are joined
    leaves   paths, as in `named_modules()`, of modules that are kept whole; [""] keeps the whole model in one stage
    balance  what a number of stages is balanced by. "time": operations of the forward and backward, which are counted
             and not timed, so that each call cuts alike; "memory": bytes of the weights
    """

    stages: str | int | Sequence[str] = "auto"
    leaves: Sequence[str] = ()
    balance: Literal["time", "memory"] = "time"

    def check(self) -> None:
        """Raise ValueError or TypeError if a field has a value that it cannot take."""
        told = 'a list of paths of modules, for example stages=pipeback.Splitting(leaves=["encoder.pool"])'
        such("leaves", self.leaves, (list, tuple, set, frozenset), told)
        one_of("balance", self.balance, ("time", "memory"), "stages=pipeback.Splitting")


@dataclass(frozen=True)
class Processes:
    """How processes share the pipeline; each of them is one worker: `Pipeline(workers=...)`.

    mesh     the ranks in the order of the pipeline, or a mesh (replicas, workers) of ranks; None: all ranks
    timeout  seconds after which a rank that does not answer is given up; every other rank then raises a `RankError`
    link     how ranks exchange tensors: "shared_memory", "gloo" or "nccl"; "auto" takes the one that the hosts and
             devices allow
    """

    mesh: DeviceMesh | None = None
    timeout: float = 30.0
    link: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto"

    def check(self) -> None:
        """Raise ValueError if a field has a value that it cannot take."""
        above_zero("timeout", self.timeout, " seconds", "workers=pipeback.Processes(timeout=30.0)")
        one_of("link", self.link, ("auto", "shared_memory", "gloo", "nccl"), "workers=pipeback.Processes")


@dataclass(frozen=True)
class Streaming:
    """Where weights live while no operation needs them, and whether they are sparse: `Pipeline(store=...)`.

    store       None: weights stay on the device of their module. "host": weights, gradients and optimizer state live in
                host memory, and a stage's weights are copied to the device when they are needed. "disk:FOLDER": they
                live in files. Or a `Store`. With replicas over processes, each rank's store keeps a slice of every
                stage that the rank computes
    device      with a store: where stages compute; None: on the device of their module. Without a store: where stages
                from the meta device are put; None: on this rank's accelerator under NCCL, else on the CPU
    init        how a module from the meta device gets its values: a function of the module, or the path of safetensors
                files that hold the weights. None: from `reset_parameters` of its layers
    sparsity    a name of `pipeback.sparsities.available()` or a `Sparsity`: most weights are zero, and zeros are
                neither stored nor sent to the device or back. "gradual" and "rigl" by name change masks during three
                quarters of 4,000 updates, which a warning says; under Lightning, of the training. None: dense weights
    skip_zeros  True: linear layers leave out the zeros by sparse products, which round differently; needs sparsity.
                "auto": only where this was measured to be faster when the pipeline was built
    """

    store: str | Store | None = None
    device: torch.device | str | None = None
    init: Callable[[nn.Module], object] | str | Path | None = None
    sparsity: str | Sparsity | None = None
    skip_zeros: bool | Literal["auto"] = False

    def check(self) -> None:
        """Raise ValueError or TypeError if a field has a value that it cannot take, or fields exclude each other."""
        none = type(None)
        told = 'None, a torch.device or its name, for example "cpu"'
        such("device", self.device, (str, torch.device, none), told)
        if isinstance(self.device, str):
            try:
                torch.device(self.device)
            except RuntimeError:  # it lists kinds of devices, and does not know of the option
                raise ValueError(f"device must be {told}, but is {self.device!r}") from None
        such("store", self.store, (str, Store, none), 'None, "host", "disk:FOLDER" or a pipeback.Store')
        told = "None, a name of pipeback.sparsities.available(), or a pipeback.Sparsity"
        such("sparsity", self.sparsity, (str, Sparsity, none), told)
        one_of("skip_zeros", self.skip_zeros, (False, True, "auto"), "store=pipeback.Streaming")
        told = "None, a function of a module, or the path of safetensors files"
        such("init", self.init, (str, Path, Callable, none), told)
        if self.skip_zeros and self.sparsity is None:
            raise ValueError(
                f"skip_zeros={self.skip_zeros!r} needs sparse weights, but there is no sparsity; "
                'leave skip_zeros out, or give one, for example store=pipeback.Streaming(sparsity="set")'
            )


@dataclass(frozen=True)
class TensorParallel:
    """How many ranks compute each stage together, each with its shard of the weights: `Pipeline(tensor_parallel=...)`.

    size  ranks per worker; the ranks are a mesh (replicas, workers, tensor). 1: none compute together
    plan  {path of a module: style}; `pipeback.tensor_parallel` has them. None: the plan of the model's
          family (GPT-2, Llama, Mixtral and ViT of transformers)
    """

    size: int = 1
    plan: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise ValueError or TypeError if a field has a value that it cannot take."""
        at_least_one("tensor_parallel", self.size)
        such("plan", self.plan, (Mapping, type(None)), "None or a dict of styles by path of a module")
        if self.plan is not None and self.size == 1:
            raise ValueError("plan has no meaning with tensor_parallel=1; give the number of ranks, or leave plan out")


@dataclass(frozen=True)
class Clipping:
    """How each stage's averaged gradient is clipped before the method uses it: `Pipeline(clip_norm=...)`.

    norm   largest norm of a stage's gradient, in the units of the gradient. None: no limit
    value  largest absolute value of an entry, applied after the norm. None: no limit
    """

    norm: float | None = None
    value: float | None = None

    def check(self) -> None:
        """Raise ValueError if a field has a value that it cannot take."""
        if self.norm is not None:
            above_zero("clip_norm", self.norm, " or None", "clip_norm=1.0")
        if self.value is not None:
            above_zero("value", self.value, " or None", "clip_norm=pipeback.Clipping(value=1.0)")


@dataclass(frozen=True)
class Debug:
    """Options that help to find a fault and change no weight: `Pipeline(debug=...)`.

    order             the order in which one loop runs operations that may run now. "grouped" runs as many as it can in
                      one call; "upstream", "sticky", "random" and "skewed" give the same weights
    seed              the seed of order="random"
    check_finite      raise an error that names the micro-batch and the stage if a loss is NaN or infinite, before its
                      backward
    stop_at_nan       raise an error after three losses in a row that are NaN; a first one is warned of in any case
    weight_functions  what to do with a layer whose graph saves an expensive function of its weights (spectral norm).
                      Without stashing, part of its backward would run on old weights. "refuse" raises an error; "warn"
                      trains it all the same
    take_back         keep a state in memory every so many pushes, and the data of the pushes since. If a push fails, it
                      is left out as if it had not come: those after the state are trained again, over processes on all
                      ranks, each of which keeps its own part. None: keep none
    """

    order: str = "grouped"
    seed: int = 0
    check_finite: bool = False
    weight_functions: Literal["refuse", "warn"] = "refuse"
    stop_at_nan: bool = True
    take_back: int | None = None

    def check(self) -> None:
        """Raise ValueError or TypeError if a field has a value that it cannot take."""
        where = "debug=pipeback.Debug"
        one_of("order", self.order, POLICIES, where)
        such("seed", self.seed, (Integral,), "a whole number, for example debug=pipeback.Debug(seed=1)")
        one_of("check_finite", self.check_finite, (False, True), where)
        one_of("stop_at_nan", self.stop_at_nan, (False, True), where)
        at_least_one("take_back", self.take_back)
        one_of("weight_functions", self.weight_functions, ("refuse", "warn"), where)


Long = TypeVar("Long", MicroBatches, Splitting, Streaming, TensorParallel, Clipping)
LONG = {
    "micro_batch_size": MicroBatches,
    "stages": Splitting,
    "workers": Processes,
    "store": Streaming,
    "tensor_parallel": TensorParallel,
    "clip_norm": Clipping,
    "debug": Debug,
}
_SHORT = ("size", "stages", "store", "norm")  # fields that are given as they are, too
_FIELDS = {
    {"value": "clip_value"}.get(field.name, field.name): (argument, kind.__name__, field.name)
    for argument, kind in LONG.items()
    for field in fields(kind)
    if field.name not in _SHORT
}


def as_long(kind: type[Long], given: Any) -> Long:
    """The long form of an argument that was given in its short or its long form."""
    return given if isinstance(given, kind) else kind(given)


def where_else(name: str, given: Mapping[str, Any]) -> str | None:
    """How to type an argument that is a field of a long form, beside the others; None if it is no such field."""
    if name not in _FIELDS:
        return None
    argument, kind, field = _FIELDS[name]
    short = None if argument in ("workers", "debug") else given.get(argument)
    first = "" if short is None or short == "auto" else f"{short!r}, "
    return f"{argument}=pipeback.{kind}({first}{field}={given[name]!r})"


NEEDED = {
    "loss": (
        "a function from the model's output and a target to a 0-d tensor, for example "
        f"loss=torch.nn.functional.cross_entropy, or {OWN_LOSS} where the model computes it from labels in x"
    ),
    "optimizer": (
        "a function from parameters to their optimizer, for example "
        "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
    ),
}


def knowing(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap `init` so that its TypeError for an unknown argument says which one to give instead."""
    known = list(signature(init).parameters)

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        for name in options:
            if name not in known:
                place, near = where_else(name, options), get_close_matches(name, known, n=1)
                cure = f"; give {place}" if place else f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"Pipeline has no argument {name!r}{cure}")
        for name, example in NEEDED.items():
            if name not in options:
                raise TypeError(f"Pipeline needs {name}=, {example}")
        init(*args, **options)

    return checked
