"""What the user gives, checked before anything is built or trained: options, functions, optimizers, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.methods.base import Method
from pipeback.runtime.loop import Batch
from pipeback.schedules.order import POLICIES
from pipeback.sparsities.base import Sparsity
from pipeback.stages.joint_optimizer import own_step, torchs_step
from pipeback.stages.stage import OptimizerFactory, Stage, Value
from pipeback.streaming.store import DeviceStore, Store


def checked_factory(optimizer: OptimizerFactory, s: int) -> OptimizerFactory:
    """`optimizer` of stage s, which raises TypeError or ValueError unless it gives an optimizer of what it is given."""

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


def check_optimizer(stage: Stage, method: Method) -> None:
    """Raise ValueError, naming the stage, where the method cannot work with the stage's optimizer."""
    opt = stage.optimizer
    if isinstance(opt, torch.optim.LBFGS):
        raise ValueError(
            f"{stage.label}: LBFGS evaluates the loss several times a step, a pipeline cannot; use SGD or Adam"
        )
    if not own_step(opt):
        raise ValueError(
            f"{stage.label}: the step of its optimizer was replaced on the object, which the pipeline's twin does not "
            f"call; override step in a subclass of {type(opt).__name__}, or register_step_pre_hook"
        )
    if stage.weights:
        try:
            method.check(opt, stage.stages)
        except ValueError as error:
            raise ValueError(f"{stage.label}: {error}") from None
        if method.steps_itself and isinstance(opt, torch.optim.SGD) and not torchs_step(opt):
            raise ValueError(
                f"{stage.label}: {method!r} makes the step of momentum SGD itself, and would never call the step of "
                f'{type(opt).__name__}; use torch.optim.SGD, or a method that calls it, such as method="pb" or '
                'pipeback.methods.create("lwp", form="weight")'
            )


def check_groups(stages: Sequence[Stage]) -> None:
    """Raise ValueError where parameters were added to the optimizer of a stage."""
    for stage in stages:
        found = {id(p) for group in stage.optimizer.param_groups for p in group["params"]}
        if stage.weights and found != {id(w) for w in stage.weights}:
            raise ValueError(f"{stage.label}: parameters were added to its optimizer; build a new Pipeline")


def check_functions(method: Any, loss: Any, optimizer: Any) -> None:
    """Raise TypeError or ValueError unless method, loss and optimizer are such."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a name or a pipeback.Method, but is {type(method).__name__}; "
            "pipeback.methods.available() lists the names"
        )
    if not callable(getattr(method, "schedule", None)):
        raise TypeError(f"method {type(method).__name__} has no schedule; set one, for example flowing(2)")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if not callable(value) and not (name == "loss" and value is None):
            example = (
                "torch.nn.functional.mse_loss" if name == "loss" else "lambda params: torch.optim.SGD(params, lr=0.1)"
            )
            raise TypeError(f"{name} must be a function, but is {type(value).__name__}; for example {name}={example}")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("loss has weights of its own, which no stage would train; put them into the last stage")


def check_numbers(stages: int, **options: Any) -> None:
    """Raise ValueError unless sizes and bounds are in their ranges, and go with the number of stages."""
    for name in ("micro_batch_size", "workers", "replicas"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1 or None, but is {value!r}")
    if (options.get("workers") or 0) > stages:
        raise ValueError(
            f"workers={options['workers']} but the model has {stages} stages; use at most one worker a stage"
        )
    if options.get("ranks", 1) > 1 and options.get("workers") is not None:
        raise ValueError(f"workers={options['workers']}: over processes each rank is a worker; leave workers out")
    if options.get("ranks", 1) > stages:
        raise ValueError(
            f"{options['ranks']} ranks share a pipeline but the model has {stages} stages; start at most one rank a "
            "stage, or give replicas= so that several pipelines share the ranks"
        )
    for name in ("clip_norm", "clip_value", "timeout"):
        value = options.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            raise ValueError(f"{name} must be above 0 or None, but is {value!r}")


def check_outside(**options: Any) -> None:
    """What goes with a loss that is computed outside."""
    for name, plain in (
        ("workers", None),
        ("micro_batch_size", None),
        ("weights", "equal"),
        ("check_finite", False),
        ("replicas", 1),
    ):
        if options[name] != plain:
            raise ValueError(f"{name}={options[name]!r} does not go with loss=None; use {name}={plain!r}")


_WORDS: dict[str, Sequence[Any]] = {
    "weights": ("equal", "samples"),
    "weight_functions": ("refuse", "warn"),
    "order": POLICIES,
    "link": ("auto", "shared_memory", "gloo", "nccl"),
    "balance": ("time", "memory"),
    "check_finite": (False, True),
    "skip_zeros": (False, True, "auto"),
}
# what else they may be, and an example
_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((str, Store, NoneType), 'None, "host", "disk:FOLDER" or a pipeback.Store'),
    "sparsity": ((str, Sparsity, NoneType), "None, a name of pipeback.sparsities.available(), or a pipeback.Sparsity"),
    "compile": ((bool, dict), "True, False or a dict of options of torch.compile"),
    "seed": ((Integral,), "a whole number"),
    "init": ((str, Path, Callable, NoneType), "None, a function of a module, or the path of safetensors files"),
    "leaves": ((list, tuple, set, frozenset), 'a list of paths of modules, for example leaves=["encoder.pool"]'),
    "device": ((str, torch.device, NoneType), 'None, a torch.device or its name, for example "cpu"'),
}


def check_options(**options: Any) -> None:
    """Raise ValueError or TypeError unless each is one of its words, or of its types."""
    for name, value in options.items():
        words, (types, told) = _WORDS.get(name), _TYPES.get(name, ((), ""))
        # 1 is no True, though equal to it
        if words is not None and not any(type(value) is type(word) and value == word for word in words):
            raise ValueError(f"{name} must be one of {', '.join(map(str, words))}, but is {value!r}")
        if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise TypeError(f"{name} must be {told}, but is {value!r}")
    if options["skip_zeros"] and options["sparsity"] is None:
        raise ValueError(
            f"skip_zeros={options['skip_zeros']!r} is about the zeros of sparse weights, but there is no sparsity; "
            'leave skip_zeros out, or give one, for example sparsity="set"'
        )


def check_skewed(vectorize: Any, order: str, activations: Any, masters: Any, **options: tuple[Any, Any]) -> None:
    """What goes with stages that run as one, and with the order that they run in. options: name -> (what was given,
    what goes with both)."""
    if vectorize not in (True, False, "auto", "cuda_graph"):
        raise ValueError(f'vectorize must be True, False, "auto" or "cuda_graph", but is {vectorize!r}')
    if vectorize:
        what, otherwise = f"vectorize={vectorize!r}", ", or vectorize=False"
        kept = "recompute" if activations == "recompute" else "device"
        options |= {"activations": (activations, kept), "masters": (masters, False), "order": (order, "grouped")}
    elif order == "skewed":
        what, otherwise = 'order="skewed"', ""
    else:
        return
    for name, (value, plain) in options.items():
        if value != plain:
            raise ValueError(f"{what} does not go with {name}={value!r}; use {name}={plain!r}{otherwise}")


def check_masters(masters: Any, store: Store | None) -> None:
    """Raise TypeError or ValueError where masters= is no choice, or does not go with the store."""
    if not isinstance(masters, bool):
        raise TypeError(f"masters must be True or False, but is {masters!r}")
    if masters and isinstance(store, DeviceStore):
        raise ValueError("masters=True does not go with sparsity, whose survivors have one type; leave masters out")
    if masters and store is not None:
        raise ValueError(
            f"masters=True does not go with store={type(store).__name__}: a store sends weights to the device as it "
            "keeps them, in one type; use store=None, or leave masters out and build the model in float32"
        )


def shares(x: Value, y: Any, replicas: int) -> list[tuple[Value, Any]]:
    """What was pushed, cut into equal parts, one for each replica of this process."""
    if replicas == 1:
        return [(x, y)]
    length = micro_batches(x, y, None)[0][2]
    if length % replicas:
        raise ValueError(f"the {length} samples pushed cannot be shared by {replicas} replicas; push a multiple of it")
    return [(a, b) for a, b, _ in micro_batches(x, y, length // replicas)]


def micro_batches(x: Value, y: Any, size: int | None) -> list[Batch]:
    """Micro-batches (x, y, samples) of what was pushed."""
    parts = x if isinstance(x, tuple) else (x,)
    if not parts or [part for part in parts if not isinstance(part, Tensor)]:
        raise TypeError(f"push takes a tensor or a tuple of tensors, but got {type(x).__name__}")
    batched = [part for part in parts if part.dim()]
    if not batched:
        raise ValueError(
            "push takes batches: the first dimension counts samples, but a 0-d tensor was given; give x[None]"
        )
    y = tuple(map(_target, y)) if isinstance(y, tuple) else _target(y)
    length = len(batched[0])
    if length == 0:
        raise ValueError("the batch that was pushed is empty; leave such batches out")
    if size is None:
        return [(x, y, length)]
    targets = [t for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor) and t.dim()]
    if any(len(part) != length for part in (*batched, *targets)):
        lengths = [len(part) for part in (*batched, *targets)]
        raise ValueError(
            f"x and y must have one length to be cut into micro-batches of {size}, but have {lengths}; push as many "
            "targets as samples, or use micro_batch_size=None"
        )
    if size >= length:
        return [(x, y, length)]

    def pieces(value: Any) -> Iterable[Any]:
        if isinstance(value, tuple) and value:
            return zip(*map(pieces, value), strict=False)
        return value.split(size) if isinstance(value, Tensor) and value.dim() else repeat(value)

    sizes = [min(size, length - begin) for begin in range(0, length, size)]
    return list(zip(pieces(x), pieces(y), sizes, strict=False))


def _target(value: Any) -> Any:
    """A part of a target, without the graph that made it, which is not ours to train."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"y must be a tensor, a number, None, or a tuple of these, but has a {type(value).__name__}")
