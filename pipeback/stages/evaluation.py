"""Evaluation: run stages in evaluation mode without changing anything that is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeback.stages.flight import Value, cut
from pipeback.stages.stage import Stage


def evaluate(stages: Sequence[Stage], x: Value) -> Value:
    """Return the output of the last of these stages for x, in evaluation mode, on the newest weights.

    The modes of the modules are put back afterwards.
    """
    modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
    try:
        for module, _ in modes:
            module.training = False
        value = x
        with torch.no_grad():
            for stage in stages:
                _, given = stage.enter(value)
                if value is x and not stage.learnt.clones_input:  # the first push finds it out
                    given = tuple(p.clone() for p in given) if isinstance(given, tuple) else given.clone()
                value = stage.module(given)
    finally:
        for module, mode in modes:
            module.training = mode
    return cut(value)
