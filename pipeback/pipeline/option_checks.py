"""Checks of the user's arguments before anything is built or trained: options, functions, optimizers, batches."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeback.counts import counted
from pipeback.methods.base import Method
from pipeback.pipeline.method_choice import allowing
from pipeback.pipeline.slices import Slices, pieces_of
from pipeback.runtime.loop import Batch
from pipeback.stages.flight import Value
from pipeback.stages.joint_optimizer import own_step, replaced_step
from pipeback.stages.stage import OptimizerFactory, Stage
from pipeback.streaming.store import DeviceStore, Store
from pipeback.tensors import batches as batches_in
from pipeback.tensors import meta


def checked_factory(optimizer: OptimizerFactory, s: int) -> OptimizerFactory:
    """`optimizer` for stage s, raising TypeError or ValueError unless it returns an optimizer of its parameters."""

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
    """Raise ValueError, naming the stage, if the method cannot work with the stage's optimizer."""
    opt = stage.optimizer
    if isinstance(opt, torch.optim.LBFGS):
        raise ValueError(
            f"{stage.label}: LBFGS evaluates the loss several times per step, a pipeline cannot; use SGD or Adam"
        )
    if not own_step(opt):
        raise ValueError(
            f"{stage.label}: the step of its optimizer was replaced on the object, but the pipeline steps a copy of "
            f"that optimizer; override step in a subclass of {type(opt).__name__}, or register_step_pre_hook"
        )
    if stage.weights:
        try:
            method.check(opt, stage.stages)
        except ValueError as error:
            names = ", ".join(f'method="{name}"' for name in allowing(opt, stage.stages))
            raise ValueError(f"{stage.label}: {error}, or one of those that allow it: {names}") from None
        if method.steps_itself and replaced_step(opt):
            raise ValueError(
                f"{stage.label}: {method!r} makes the step itself, and would never call the step of "
                f'{type(opt).__name__}; use torch.optim.{_known(opt)}, or a method that calls it, such as method="pb" '
                'or pipeback.methods.create("lwp", form="weight")'
            )


def _known(optimizer: torch.optim.Optimizer) -> str:
    kinds = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam
    return next(kind.__name__ for kind in kinds if isinstance(optimizer, kind))


def check_whole_weights(method: Method, sparse: bool, shards: bool) -> None:
    """Raise ValueError if a method needs whole weights, but a stage holds only some of their entries.

    sparse: whether these are the ones that survive. shards: whether they are a rank's slice.
    """
    if not method.elementwise and (sparse or shards):
        what, cure = ("sparsity keeps some of their entries", "leave sparsity out") if sparse else (
            "every replica's store keeps a slice of them", "use store=None, or one replica"
        )  # fmt: skip
        raise ValueError(f'{method!r} looks at whole weights, but {what}; {cure}, or use method="pb"')
    if method.needs_used and sparse:
        raise ValueError(
            f"{method!r} compares two versions of the weights, but under sparsity other entries may survive in each; "
            'leave sparsity out, or use method="pipedream"'
        )


def check_functions(method: Any, loss: Any, optimizer: Any) -> None:
    """Raise TypeError or ValueError unless these are a method, a loss function and an optimizer function."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a name or a pipeback.Method, but is {type(method).__name__}; "
            "pipeback.methods.available() lists the names"
        )
    if not callable(getattr(method, "schedule", None)):
        raise TypeError(f"method {type(method).__name__} has no schedule; set one, for example flowing(2)")
    if (asked := _other_than_two(method.schedule)) is not None:
        raise TypeError(
            f"the schedule of method {type(method).__name__} is called with a stage and their number, but takes {asked}"
            "; write it without self, for example def schedule(stage, stages)"
        )
    if method.copies not in ("live", "scratch", "stash"):
        raise ValueError(
            f'method {type(method).__name__} keeps copies of an unknown kind, {method.copies!r}; set copies = "live", '
            'copies = "scratch" or copies = "stash"'
        )
    if method.needs_used and method.copies != "stash":
        raise ValueError(
            f'method {type(method).__name__} needs the weights that F used, but its copies are "{method.copies}", '
            'which keep none; set copies = "stash"'
        )
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if not callable(value) and not (name == "loss" and value is None):
            example = "torch.nn.functional.mse_loss" if name == "loss" else f"lambda params: {_call(value)}"
            raise TypeError(f"{name} must be a function, but is {type(value).__name__}; for example {name}={example}")
    if loss is not None:
        _check_takes_two(loss)
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("loss has weights of its own, which no stage would train; put them into the last stage")


def _check_takes_two(loss: Any) -> None:
    """Raise TypeError unless a loss can be called with an output and a target; nothing where this is not known."""
    if (asked := _other_than_two(loss)) is not None:
        raise TypeError(
            f"loss is called with the model's output and the target, which may be None, but takes {asked}; for example "
            "loss=lambda output, _: output.square().mean()"
        )


def _other_than_two(function: Any) -> inspect.Signature | None:
    """The signature of a function that cannot be called with two arguments; None if it can, or this is not known."""
    try:
        asked = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # functions of C have none
        return None
    try:
        asked.bind(None, None)
    except TypeError:
        return asked
    return None


def _call(value: Any) -> str:
    """How an optimizer like this one is made of `params`: its class, and its options where they are not the usual."""
    if not isinstance(value, torch.optim.Optimizer):
        return "torch.optim.SGD(params, lr=0.1)"
    kind = type(value)
    usual = inspect.signature(kind).parameters
    options = [
        f", {key}={found!r}"
        for key, found in value.defaults.items()
        if key in usual and (key == "lr" or found != usual[key].default)
    ]
    where = "torch.optim." if getattr(torch.optim, kind.__name__, None) is kind else ""
    return f"{where}{kind.__name__}(params{''.join(options)})"


def one_of(name: str, value: Any, words: Sequence[Any], where: str) -> None:
    """Raise ValueError unless the value is one of the words. where: the long form that has such a field."""
    # 1 is no True, though equal to it
    if not any(type(value) is type(word) and value == word for word in words):
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, words))}, but is {value!r}; for example "
            f"{where}({name}={words[0]!r})"
        )


def such(name: str, value: Any, types: tuple[Any, ...], told: str) -> None:
    """Raise TypeError unless the value is of one of the types, which `told` lists."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError(f"{name} must be {told}, but is {value!r}")


def at_least_one(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a whole number of at least 1, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1 or None, but is {value!r}")


def above_zero(name: str, value: Any, what: str, example: str) -> None:
    """Raise ValueError unless the value is a number above 0. what: what else it may be; example: how to type it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be above 0{what}, but is {value!r}; for example {example}")


def check_workers(stages: int, ranks: int, threads: Any) -> None:
    """Raise ValueError if there are fewer stages than workers."""
    if (threads or 0) > stages:
        raise ValueError(
            f"workers={threads} but the model has {counted(stages, 'stage')}; use at most one worker per stage"
        )
    if ranks > 1 and threads is not None:
        raise ValueError(f"workers={threads}: over processes each rank is a worker; leave workers out")
    if ranks > stages:
        raise ValueError(
            f"{ranks} ranks share a pipeline but the model has {counted(stages, 'stage')}; start at most one rank "
            "per stage, or "
            "give replicas= so that several pipelines share the ranks"
        )


def check_placement(method: Method, stages: int, workers: int) -> None:
    """Raise ValueError if there are fewer stages than parts that the method puts on so many workers."""
    if workers > 1 and workers * method.chunks > stages:
        fewer = f", or chunks={stages // workers}" if method.placement == "loop" else ""
        raise ValueError(
            f"{method!r} puts {method.chunks} parts of the stages on each worker, but {workers} workers share "
            f"{counted(stages, 'stage')}; use at most {counted(max(1, stages // method.chunks), 'worker')}{fewer}"
        )


def check_goes_with(what: str, otherwise: str, given: Iterable[tuple[str, Any, Any, str]]) -> None:
    """Raise ValueError if an option excludes `what`; given: (name, value, the value that does not, its cure)."""
    for name, value, plain, cure in given:
        if value != plain:
            raise ValueError(f"{what} does not go with {name}={value!r}; use {cure}{otherwise}")


def check_masters(masters: Any, store: Store | None) -> None:
    """Raise TypeError or ValueError if masters= is not a bool, or does not go with the store."""
    if not isinstance(masters, bool):
        raise TypeError(f"masters must be True or False, but is {masters!r}")
    if masters and isinstance(store, DeviceStore):
        raise ValueError("masters=True does not go with sparsity, whose survivors have one type; leave masters out")
    if masters and store is not None:
        raise ValueError(
            f"masters=True does not go with store={type(store).__name__}: a store sends weights to the device as it "
            "keeps them, in one type; use store=None, or leave masters out and build the model in float32"
        )


def shares(x: Value, y: Any, size: int | None, replicas: int) -> Sequence[Batch]:
    """Micro-batches (x, y, samples) of a push: all of one replica of this process before those of the next.

    Each replica gets as many of them, and as many samples as the next or one more.
    """
    if replicas == 1:
        return micro_batches(x, y, size)
    length = micro_batches(x, y, None)[0][2]
    each = 1 if size is None else -(-length // (size * replicas))  # micro-batches of each replica
    least, more = divmod(length, replicas)
    if least < each:
        raise ValueError(
            f"the {counted(length, 'sample')} pushed cannot be shared by {replicas} replicas; push a multiple of "
            f"{replicas} "
            "(DataLoader(drop_last=True) leaves a short last batch out)"
        )
    found: list[Batch] = []
    for a, b, samples in micro_batches(x, y, [least + 1] * more + [least] * (replicas - more)):
        cut = batches_in.sizes(samples, samples if size is None else size)
        if len(cut) < each:
            cut[-1:] = cut[-1] - 1, 1  # the others have one sample more, and so one micro-batch more
        found += micro_batches(a, b, cut)
    return found


def check_tensors(x: Any, who: str = "push") -> tuple[Tensor, ...]:
    """The tensors of an x that is pushed or evaluated. Raises TypeError for anything else, with a cure."""
    parts = x if isinstance(x, tuple) else (x,)
    odd = [type(part).__name__ for part in parts if not isinstance(part, Tensor)]
    if odd or not parts:
        inside = f"tuple with a {odd[0]} in it" if odd and x is parts else type(x).__name__
        cure = _as_tensors(x)
        raise TypeError(
            f"{who} takes a tensor or a tuple of tensors, but got {inside}: the modules of this pipeline are called "
            f"one on the output of the other; {cure}, or a model with a forward of its own, whose arguments may be "
            "anything, and example=, one such x"
        )
    return parts


def _as_tensors(x: Any) -> str:
    """How the tensors in x are given to the modules of a sequence."""
    held = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, list) else []
    if not held or not all(isinstance(part, Tensor) for part in held):
        return "give tensors"
    if len(held) == 1:
        return f"give x[{next(iter(x))!r}]" if isinstance(x, Mapping) else "give x[0]"
    return "give tuple(x.values())" if isinstance(x, Mapping) else "give tuple(x)"


def micro_batches(
    x: Value, y: Any, size: int | Sequence[int] | None, who: Literal["push", "evaluate"] = "push"
) -> Sequence[Batch]:
    """x and y, cut into batches (x, y, samples) of `size` samples, or of so many each; None: they are one.

    who: what has got them, in messages.
    """
    parts = check_tensors(x, who)
    option = "micro_batch_size" if who == "push" else "batch_size"
    batched = [part for part in parts if part.dim()]
    if not batched:
        raise ValueError(
            f"{who} takes batches: the first dimension counts samples, but a 0-d tensor was given; give x[None]"
        )
    y = batches_in.checked(y)
    if who == "push" and any(map(Tensor.is_inference, (*parts, *batches_in.tensors(y)))):
        raise ValueError(
            "push got tensors of inference mode, of which autograd keeps nothing; make them outside of "
            "torch.inference_mode(), or push a clone() of each"
        )
    try:
        length = len(batched[0])
    except RuntimeError as error:
        raise TypeError(
            f"{who}: a nested tensor of layout {batched[0].layout} has no shape; make it with layout=torch.jagged"
        ) from error
    if length == 0:
        raise ValueError(f"the batch that {who} got is empty; leave such batches out")
    if size is None:
        return [(x, y, length)]
    sizes = batches_in.sizes(length, size) if isinstance(size, int) else list(size)
    largest = size if isinstance(size, int) else max(size)
    if (sparse := next((part for part in parts if part.layout is not torch.strided), None)) is not None:
        raise ValueError(
            f"{who} got a tensor of layout {sparse.layout}, which is not cut into micro-batches or shared by replicas; "
            f"{who} it as .to_dense(), or one micro-batch at a time, with {option}=None"
            f"{' and replicas=1' * (who == 'push')}"
        )
    lengths = [*map(len, batched), *batches_in.samples(y)]
    if any(found != length for found in lengths):
        raise ValueError(
            f"x and y must have one length to be cut into micro-batches of {largest}, but have {lengths}; {who} as "
            f"many targets as samples, or use {option}=None"
        )
    if len(sizes) == 1:
        return [(x, y, length)]

    if isinstance(size, int) and batches_in.simple(y):
        return Slices(x, y, length, size)

    def pieces(value: Any) -> Iterable[Any]:
        if not batches_in.simple(value):
            return batches_in.cut(value, sizes)
        return pieces_of(value, 0, length, sizes)

    return list(zip(pieces(x), pieces(y), sizes, strict=False))


def check_going_back(every: int, link: str, devices: Collection[str], replicas: int, shards: bool) -> None:
    """Raise ValueError if ranks could not go back to a state. every: the pushes between two. devices: of the stages."""
    if shards:
        raise ValueError(
            f"take_back={every}: a store splits weights over the ranks of the replicas, which could not go back to a "
            "state; use store=None, or leave take_back out"
        )
    if link == "nccl" or ("cuda" in devices and (link == "auto" or replicas > 1)):
        raise ValueError(
            f"take_back={every}: a wait for NCCL does not end when another rank has failed; use "
            "workers=pipeback.Processes(link='gloo') and no replicas, or leave take_back out"
        )


def check_init(init: Any, model: nn.Module) -> None:
    """Raise ValueError if values are given to a model that has them already."""
    if init is not None and not meta.absent(model):
        what = f"{str(init)!r}" if isinstance(init, (str, Path)) else "a function"
        raise ValueError(
            f"Streaming(init=) is {what}, which gives values to weights on the meta device, but the model has its "
            'values; build it in torch.device("meta"), or leave init out'
        )
