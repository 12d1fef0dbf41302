"""Named parameters: an optimizer function that asks for names is given those of the user's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pipeback.pipeline.own_parameters import OfWeights, stepping
from pipeback.splitting.partition import StagePart
from pipeback.stages.stage import OptimizerFactory

NAMES = ("named_parameters", "named_params", "named")  # of a first parameter that asks for names


def asked(factory: Callable[..., Any]) -> str | None:
    """The name by which a function asks for named parameters: its first parameter is called so. None: it does not."""
    try:
        first = next(iter(inspect.signature(factory).parameters), None)
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    return first if first in NAMES else None


def by_stage(factory: OptimizerFactory, model: nn.Module, parts: Sequence[StagePart]) -> list[OptimizerFactory]:
    """One function per stage, which takes the weights that it steps and gives `factory` what it asks for.

    A stage without weights has one empty parameter, whose name is "".
    """
    name = asked(factory)
    names = {id(p): key for key, p in model.named_parameters()}

    def called(s: int, module: nn.Module) -> OptimizerFactory:
        trained = [(n, names[id(p)]) for n, p in enumerate(module.parameters()) if p.requires_grad]
        mine = [key for _, key in trained] or [""]

        def make(params: list[Any]) -> Any:
            return factory(params if name is None else list(zip(mine, params, strict=True)))

        def made(weights: Sequence[nn.Parameter]) -> Any:
            try:
                if isinstance(factory, OfWeights) or not trained:
                    return make(list(weights))
                every = list(module.parameters())
                return stepping(make, [every[n] for n, _ in trained], weights)
            except (AttributeError, TypeError, ValueError) as error:
                if (cure := _cure(name, str(error))) is None:
                    raise
                raise TypeError(f"stage {s}: the optimizer function failed: {error}; {cure}") from error

        return made

    return [called(s, part.module) for s, part in enumerate(parts)]


def _cure(name: str | None, error: str) -> str | None:
    """What to write where a function took parameters for named ones, or the other way round; None: it did neither."""
    if name is None and "unpack" in error:
        return "for names write optimizer=lambda named_parameters: ..., or call the function's first parameter so"
    if name is not None and "'tuple'" in error:
        return f"{name} has pairs (name, parameter); for parameters alone write optimizer=lambda params: ..."
    return None
