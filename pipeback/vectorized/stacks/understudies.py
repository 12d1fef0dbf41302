"""Understudies: stages that stand in for stages of a pipeline while these are timed, so that no weight of the user's is
stepped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeback.methods.base import Method
from pipeback.stages.joint_optimizer import Options
from pipeback.stages.stage import Stage


def understudies(stages: Sequence[Stage], method: Method, options: Options) -> list[Stage]:
    """Return stages that compute what these do, as before their first update, on weights of their own.

    Their optimizers are of the same class, with these options and without hooks.
    """
    found = []
    for stage in stages:
        module, optimizer = copy.deepcopy(stage.module), partial(_likewise, stage, options)
        made = Stage(stage.index, stage.stages, module, stage.name, method, optimizer, keeping=stage.keeping)
        made.learn(**stage.learnt._asdict())
        found.append(made)
    return found


def _likewise(stage: Stage, options: Options, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer like that of a stage, of these weights."""
    mine = dict(zip(map(id, stage.weights), weights, strict=False))  # a stage without weights has one of no elements
    pairs = zip(stage.optimizer.param_groups, options.groups[stage.index], strict=True)
    groups = [{**told, "params": [mine.get(id(w), weights[0]) for w in now["params"]]} for now, told in pairs]
    kind: Any = type(stage.optimizer)
    made: torch.optim.Optimizer = kind(groups)
    return made
