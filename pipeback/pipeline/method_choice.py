"""Method choice: the method of a pipeline, from an object, a name, or the optimizer if none is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pipeback import methods
from pipeback.methods.base import Method
from pipeback.pipeline.by_name import UPDATES, completed
from pipeback.splitting.partition import StagePart
from pipeback.stages.joint_optimizer import replaced_step
from pipeback.stages.stage import OptimizerFactory

DEFAULT, ANY_OPTIMIZER = "cerebras", "pipedream"


def chosen(given: Any, factories: Sequence[OptimizerFactory], parts: Sequence[StagePart]) -> Any:
    """The method for these stages: `given`, the one of that name, or, for None, one that the optimizer allows.

    factories: the user's function for each stage.

    Options that a name needs are derived from the number of stages and a training of 4,000 updates, and a warning says
    so if they are a guess.
    """
    if given is None:
        given = by_optimizer(_tried(factories, parts))
    return named(given, len(parts)) if isinstance(given, str) else given


def named(name: str, stages: int, updates: int | None = None, **options: Any) -> Method:
    """The method of this name. updates: of the whole training, if it is known."""
    cure = f'method=pipeback.methods.create("{name}", {{}})'
    values = completed(f"method={name!r}", lambda n: methods.derived(name, stages, n), updates, cure, **options)
    return methods.create(name, **values)


def by_optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """The method where none is given: the default if the optimizer allows it, or one that takes any optimizer."""
    if optimizer is None or DEFAULT in (names := list(allowing(optimizer))) or ANY_OPTIMIZER not in names:
        return DEFAULT
    warnings.warn(
        f'method="{ANY_OPTIMIZER}" is taken, since no method= is given and the default, "{DEFAULT}", is written for '
        f"momentum SGD, while the optimizer is {_described(optimizer)}. It keeps up to D + 1 copies of the weights; "
        'method="pb" keeps one',
        stacklevel=2,
    )
    return ANY_OPTIMIZER


def allowing(optimizer: torch.optim.Optimizer, stages: int = 2) -> Iterator[str]:
    """The names of the methods that allow this optimizer."""
    for name in methods.available():
        try:
            method = methods.create(name, **methods.derived(name, stages, UPDATES))
            method.check(optimizer, stages)
        except (ValueError, ImportError):
            continue
        if not method.steps_itself or not replaced_step(optimizer):
            yield name


def _described(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for key in ("nesterov", "dampening", "momentum"):
                if bool(group[key]) != (key == "momentum"):
                    return f"{name} with {key}={group[key]}"
    return name


def _tried(factories: Sequence[OptimizerFactory], parts: Sequence[StagePart]) -> torch.optim.Optimizer | None:
    """What the user's function returns for the first stage that has weights; None if it fails, which is told later."""
    for factory, part in zip(factories, parts, strict=True):
        weights = [p for p in part.module.parameters() if p.requires_grad]
        if weights:
            try:
                made: Any = factory(weights)
            except Exception:
                return None
            return made if isinstance(made, torch.optim.Optimizer) else None
    return None
