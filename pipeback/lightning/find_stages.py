"""Finds the stages of a LightningModule: which of its modules the pipeline trains, and what each stage is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeback.counts import counted
from pipeback.lightning.call_override import call_instead, without_hooks
from pipeback.lightning.followed_step import FollowedStep, Given
from pipeback.pipeline.arguments import Splitting
from pipeback.splitting.call_arguments import Arguments
from pipeback.splitting.cut_points import Cuts, chosen
from pipeback.splitting.partition import plain
from pipeback.splitting.split import Split, at_once, split_model
from pipeback.splitting.uncompiled import uncompiled
from pipeback.tensors.structures import opened

_AUTO = Splitting()


class TrainedModule(NamedTuple):
    """The module that the pipeline trains, and how it is cut into stages."""

    name: str  # the attribute of the LightningModule
    module: nn.Module  # the stages together compute its forward
    cuts: Cuts
    leaves: tuple[str, ...]
    split: Split | None  # None: its forward is traced when it is called first
    balance: str  # what a number of stages is balanced by
    step: FollowedStep | None = None  # what training_step calls, where that itself is followed

    @property
    def followed(self) -> bool:
        """Whether stages are cut from a trace of the module's forward, whose arguments and results may be any."""
        return self.split is None

    @property
    def stages(self) -> list[nn.Module]:
        """The stages of a sequence; a module that is traced has none yet."""
        return [] if self.split is None else [part.module for part in self.split.parts]

    @property
    def shown(self) -> str:
        """The module in messages."""
        return "self" if self.step is not None else f"self.{self.name}"

    def name_of(self, some: Sequence[Tensor]) -> str | None:
        """The name of one of these that is a weight of the module; None: there is none."""
        ids = {id(tensor) for tensor in some}
        return next((name for name, p in self.module.named_parameters() if id(p) in ids), None)

    @contextmanager
    def heard(self, given: Given, forward: Callable[..., Any], look: Callable[[], None]) -> Iterator[None]:
        """A context for a call of `training_step`, within which calls of the module with gradients go to `forward`.

        look: hears of calls without gradients, before they are made.
        """
        if self.step is not None:
            with self.step.heard(given, forward, look):
                yield
            return
        original = self.module.forward

        def instead(*inputs: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return forward(*inputs, **named)
            look()
            return original(*inputs, **named)

        with call_instead(self.module, instead):
            yield

    def given(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The input of the pipeline that stands for a call of the module with these arguments."""
        return Arguments(inputs, named) if self.followed else inputs[0]

    def cut(self, module: nn.Module, example: Any) -> Split:
        """Cut the module, or a copy of it, into stages. example: the input of the pipeline in its first call."""
        return split_model(module, self.cuts, _on_device_of(module, example), self.leaves, self.balance)


def find(module: nn.Module, nominated: str | None, splitting: Splitting = _AUTO) -> TrainedModule:
    """Find the nominated module, or the one inside it that is a sequence of stages; else it is traced itself.

    nominated: the name of an attribute, or "self" to follow `training_step`; None: `model`, or else the only child with
    trainable weights, if it has all of them, and "self" otherwise.

    A sequence is an `nn.Sequential`, has `pipeline_stages()`, or holds all its trainable weights in one child that is
    a sequence. Raises ValueError or TypeError that names what was found and the cure.
    """
    splitting.check()
    cuts, leaves = splitting.stages, tuple(splitting.leaves)
    chosen(cuts)
    uncompiled(module, type(module).__name__)
    nominated = _by_itself(module) if nominated is None else nominated
    if nominated == "self":
        step = FollowedStep(cast(LightningModule, module))
        return TrainedModule(nominated, step.model, cuts, leaves, None, splitting.balance, step)
    top = _nominated(module, nominated)
    if isinstance(top, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"{nominated!r} ({type(top).__name__}) has no forward, so training_step cannot call it; write it as an "
            "nn.Sequential, or nominate the module that runs it with PipelineStrategy(module=...)"
        )
    name, body = nominated, top
    while (found := _at_once(body, cuts, leaves)) is None:
        holders = [(n, child) for n, child in body.named_children() if _trainable(child)]
        own = any(p.requires_grad for p in body.parameters(recurse=False))
        if len(holders) != 1 or own or plain(body):
            return TrainedModule(nominated, top, cuts, leaves, None, splitting.balance)
        name, body = f"{name}.{holders[0][0]}", holders[0][1]
    return TrainedModule(name, body, cuts, leaves, found, splitting.balance)


def _at_once(body: nn.Module, cuts: Cuts, leaves: tuple[str, ...]) -> Split | None:
    with without_hooks(body):  # which its call in training_step runs
        return at_once(body, cuts, leaves)


def check_outside(module: nn.Module, body: TrainedModule, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer trains all weights of the pipelined module and no others."""
    named = {id(p): name for name, p in module.named_parameters()}
    inside = {id(p): name for name, p in body.module.named_parameters() if p.requires_grad}
    given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not given & set(inside):
        raise ValueError(
            f"the optimizer holds no weight of {body.name!r}; return one over self.parameters() from "
            "configure_optimizers"
        )
    for identity in given - set(inside):
        name = named.get(identity, "a parameter that is not in the module")
        raise ValueError(
            f"{name} is trained by the optimizer, but lies outside {body.name!r}, where no stage would train it; "
            f"move it into a stage of {body.name!r}, leave it out of the optimizer, or have all modules trained that "
            'training_step calls: PipelineStrategy(module="self")'
        )
    for identity, name in inside.items():
        if identity not in given:
            raise ValueError(
                f"{body.name}.{name} requires a gradient, but is in no group of the optimizer; add it, or set its "
                "requires_grad to False before training"
            )


@torch.no_grad()
def check_chain(
    body: TrainedModule, x: Any, present: Callable[[int], AbstractContextManager[Any]] | None = None
) -> None:
    """Raise unless the stages, run one after the other, compute the same as the forward of the module.

    present: returns a context, given the number of a stage, within which that stage has its weights.
    """
    modes = [(m, m.training) for m in body.module.modules()]
    hooks: list[Any] = []
    for s, stage in enumerate(body.stages):
        if present is not None:
            time = ExitStack()
            hooks.append(stage.register_forward_pre_hook(partial(_enter, time, present, s)))
            hooks.append(stage.register_forward_hook(partial(_leave, time), always_call=True))
    try:
        for m, _ in modes:
            m.training = False
        wanted, value = type(body.module).forward(body.module, x), x
        for stage in body.stages:
            value = stage(value)
    finally:
        for hook in hooks:
            hook.remove()
        for m, mode in modes:
            m.training = mode
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (wanted, value)), strict=False)
    if type(wanted) is not type(value) or not all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs):
        raise ValueError(
            f"{body.name}.pipeline_stages() does not compute what {type(body.module).__name__}.forward does; return "
            "the modules in the order in which they run, and put what happens between them into modules, too"
        )


def _enter(time: ExitStack, present: Callable[[int], AbstractContextManager[Any]], s: int, *_: Any) -> None:
    time.enter_context(present(s))


def _leave(time: ExitStack, *_: Any) -> None:
    time.close()


def _by_itself(module: nn.Module) -> str:
    """The name of the module that the pipeline trains, where none is nominated."""
    if any(p.requires_grad for p in module.parameters(recurse=False)):
        return "self"
    holders = {name: child for name, child in module.named_children() if _trainable(child)}
    if "model" in module._modules and not holders.keys() - {"model"}:
        return "model"
    one = len(holders) == 1 and not any(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in holders.values())
    return next(iter(holders)) if one else "self"


def _nominated(module: nn.Module, name: str) -> nn.Module:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.Module):
        return found
    near = [n for n, child in module.named_children() if _trainable(child)]
    cure = (
        f"nominate another with PipelineStrategy(module={near[0]!r})"
        if len(near) == 1
        else f"put the layers into one nn.Sequential and call it self.{name}"
    )
    has = f"its modules with trainable weights are {', '.join(near)}" if near else "it has no trainable weights"
    what = "is no module" if found is not None else "does not exist"
    raise ValueError(f"{type(module).__name__}.{name} {what}, but the pipeline runs through it; {has}: {cure}")


def _trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _on_device_of(module: nn.Module, example: Any) -> Any:
    """Move the example to where the weights are: to host memory, if a store will take them in."""
    device = next((p.device for p in module.parameters()), None)
    if device is None or device.type == "meta" or not isinstance(example, Arguments):
        return example
    tensors, form = opened(tuple(example))
    return Arguments(*form.fill([t.to(device) for t in tensors]))


def few(shown: str, stages: int, ranks: int) -> str:
    """The message of the error that there are fewer stages than devices. shown: the module that is trained."""
    return (
        f"several devices: {shown} has {counted(stages, 'stage')} for {ranks} devices; use as many devices or "
        "less, or "
        'split it finer (stages="layer")'
    )
