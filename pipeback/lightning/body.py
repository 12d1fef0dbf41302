"""The stages of a LightningModule: which of its modules is the pipeline, and what each stage is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.inflight import nodes
from pipeback.partition import balance, declared, plain


class Body(NamedTuple):
    """Where the pipeline is."""

    name: str  # in the LightningModule
    module: nn.Module  # its forward is what the stages compute one after the other
    stages: list[nn.Module]


def find(module: nn.Module, nominated: str, stages: Any) -> Body:
    """The nominated module of `module`, or the one inside it, that is a sequence of stages.

    It is an `nn.Sequential`, has `pipeline_stages()`, or holds all its trainable weights in one child that is such.
    stages: "auto", a stage a child, or their number: neighbours joined, balanced by their weights.
    Raises ValueError or TypeError that names what was found and the cure.
    """
    if stages != "auto" and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise ValueError(f'stages must be "auto" (a stage a child) or a whole number of at least 1, but is {stages!r}')
    name, body = nominated, _nominated(module, nominated)
    while not _sequence(body):
        holders = [(n, child) for n, child in body.named_children() if _trainable(child)]
        own = [n for n, p in body.named_parameters(recurse=False) if p.requires_grad]
        if len(holders) != 1 or own or isinstance(body, nn.Sequential):
            raise TypeError(_no_sequence(name, body, own, [n for n, _ in holders]))
        name, body = f"{name}.{holders[0][0]}", holders[0][1]
    parts = _stages(name, body)
    if _trainable(body) and isinstance(stages, int):
        parts = _joined(parts, stages)
    return Body(name, body, parts)


def check_outside(module: nn.Module, body: Body, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer trains the weights of the body, all of them and no others."""
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
            f"move it into a stage of {body.name!r}, or leave it out of the optimizer"
        )
    for identity, name in inside.items():
        if identity not in given:
            raise ValueError(
                f"{body.name}.{name} requires a gradient, but is in no group of the optimizer; add it, or set its "
                "requires_grad to False before training"
            )


@torch.no_grad()
def check_chain(body: Body, x: Any, present: Callable[[int], AbstractContextManager[Any]] | None = None) -> None:
    """Raise unless the stages, one after the other, compute what the module's own forward does.

    present: the time in which a stage has its weights.
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


def check_loss(body: Body, loss: Tensor, output: Any) -> None:
    """Raise unless the loss has been computed from the output of the pipeline."""
    leaves = {id(part) for part in (output if isinstance(output, tuple) else (output,))}
    if not any(id(getattr(node, "variable", None)) in leaves for node in nodes([loss])):
        raise ValueError(
            f"the loss that training_step returned does not depend on the output of self.{body.name}; compute it from "
            "the output with differentiable operations"
        )


def _enter(time: ExitStack, present: Callable[[int], AbstractContextManager[Any]], s: int, *_: Any) -> None:
    time.enter_context(present(s))


def _leave(time: ExitStack, *_: Any) -> None:
    time.close()


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


def _sequence(module: nn.Module) -> bool:
    return plain(module) or callable(getattr(module, "pipeline_stages", None))


def _trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _no_sequence(name: str, body: nn.Module, own: list[str], holders: list[str]) -> str:
    if own:
        has = f"has weights of its own ({', '.join(own)})"
    elif holders:
        has = f"spreads its weights over {', '.join(holders)}"
    else:
        has = "has no trainable weights"
    if isinstance(body, nn.Sequential):
        has = "has a forward of its own"
    return (
        f"{name!r} ({type(body).__name__}) is no sequence of stages: it {has}. Write it as an nn.Sequential, or give "
        "it a method pipeline_stages() that returns its modules in the order in which they run"
    )


def _stages(name: str, body: nn.Module) -> list[nn.Module]:
    if not callable(getattr(body, "pipeline_stages", None)):
        assert isinstance(body, nn.Sequential)
        return list(body)
    return declared(name, body)


def _joined(parts: list[nn.Module], count: int) -> list[nn.Module]:
    if count > len(parts):
        raise ValueError(
            f'stages={count}, but there are {len(parts)} modules to share out; use that or less, or "auto"'
        )
    owner = balance([float(sum(p.numel() for p in part.parameters())) + 1e-3 for part in parts], count)
    groups = [[part for part, s in zip(parts, owner, strict=True) if s == n] for n in range(count)]
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]
