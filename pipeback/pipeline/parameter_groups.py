"""Parameter groups: whether a pipeline can go on with what the user has made of the groups of its optimizers.

Their options may be others from push to push. The weights in them stay, since micro-batches in flight refer to the
groups by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

from torch import Tensor

from pipeback.methods.base import Method
from pipeback.pipeline.option_checks import check_optimizer
from pipeback.stages.joint_optimizer import Group, Options
from pipeback.stages.stage import Stage

_NUMBERS, _RATES = (Number, Tensor), {"params", "lr"}


def check_groups(stages: Sequence[Stage], method: Method, before: Options) -> None:
    """Raise ValueError, naming the stage, unless these groups can follow those of before."""
    same = before.same_weights([stage.optimizer.param_groups for stage in stages])
    for stage in stages:
        groups, known = stage.optimizer.param_groups, before.groups[stage.index]
        if stage.weights and not same:
            _check_weights(stage, groups, known)
        others = False
        for n, (group, old) in enumerate(zip(groups, known, strict=False)):
            changed = [key for key, value in old.items() if group.get(key) is not value]  # among them is "params"
            others = others or not _RATES.issuperset(changed)
            for key in changed:
                if type(group.get(key)) not in (float, list):
                    _check_number(stage, n, group, key, old[key])
        if others:
            check_optimizer(stage, method)


def _check_weights(stage: Stage, groups: list[Group], known: list[Group]) -> None:
    found, had = _places(groups), _places(known)
    if not set(found) <= set(had) or sum(len(group["params"]) for group in groups) > len(found):
        raise ValueError(f"{stage.label}: parameters were added to its optimizer; build a new Pipeline")
    other = [n for n, w in enumerate(stage.weights) if found.get(id(w)) != had.get(id(w))]
    if not other and len(groups) == len(known):
        return
    name = _name(stage, other[0]) if other else ""
    if other and id(stage.weights[other[0]]) not in found:
        raise ValueError(
            f"{stage.label}: {name} was taken out of the parameter groups of its optimizer; put it back, or call "
            "requires_grad_(False) on it and build a new Pipeline"
        )
    raise ValueError(
        f"{stage.label}: the parameter groups of its optimizer are others{name and f', {name} is in another one'}, but "
        "micro-batches in flight refer to them as they were; put them back, or build a new Pipeline with an optimizer "
        "function that makes these groups"
    )


def _places(groups: list[Group]) -> dict[int, int]:
    """The number of the group of each weight, by the weight's identity."""
    return {id(w): n for n, group in enumerate(groups) for w in group["params"]}


def _name(stage: Stage, number: int) -> str:
    return next(name for name, p in stage.module.named_parameters() if p is stage.params[number])


def _check_number(stage: Stage, number: int, group: Group, key: str, old: Any) -> None:
    """Raise ValueError if an option of this group was a number and is none any more."""
    if isinstance(old, _NUMBERS) and not isinstance(old, bool) and not isinstance(group.get(key), _NUMBERS):
        what = f"is {group[key]!r}" if key in group else "is missing"
        value = old.item() if isinstance(old, Tensor) else old
        raise ValueError(
            f"{stage.label}: {key} of its optimizer {what}, but must be a number; set it again, for example "
            f'pipe.optimizers[{stage.index}].param_groups[{number}]["{key}"] = {value!r}'
        )
