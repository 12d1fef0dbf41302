"""Optimizer counters: values that an optimizer's step changes outside the state of its weights.

Torch's own optimizers have none. Others count in the options of their groups (`group["k"] += 1`, an estimate of the
rate), or in attributes of their own. Such values are not options: they follow the steps rather than the pushes, belong
to the stage, and are saved with it. We find them by comparing values before and after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Group = dict[str, Any]


class OptimizerCounters:
    """The counters of one optimizer: options by the number of their group, and attributes."""

    def __init__(self) -> None:
        self.options: set[tuple[int, str]] = set()
        self.attributes: set[str] = set()
        self.first: dict[str, tuple[Any, dict[str, Tensor]]] = {}  # attributes as they were before all steps
        self.keys: list[set[str]] = []  # of the options of each group then

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what is there before the first step, to which a state from before it leads back."""
        if not self.keys:
            self.keys = [set(group) for group in optimizer.param_groups]
            for key in _seen(vars(optimizer)):
                with suppress(TypeError):  # it cannot be saved either
                    tensors: dict[str, Tensor] = {}
                    value = _plain(vars(optimizer)[key], tensors, key)
                    self.first[key] = value, {n: t.detach().clone() for n, t in tensors.items()}

    def __bool__(self) -> bool:
        return bool(self.options or self.attributes)

    def without(self, groups: Sequence[Group]) -> list[Group]:
        """The options of each group, without the counters among them."""
        return [{k: v for k, v in group.items() if (n, k) not in self.options} for n, group in enumerate(groups)]


counted_by: WeakKeyDictionary[torch.optim.Optimizer, OptimizerCounters] = WeakKeyDictionary()  # found so far


def counted(optimizer: torch.optim.Optimizer) -> OptimizerCounters:
    return counted_by.setdefault(optimizer, OptimizerCounters())


def stepped(optimizer: torch.optim.Optimizer, groups: list[Group], step: Callable[[], Any]) -> None:
    """Make a step on these groups instead of the optimizer's own, and write back the values that it has counted."""
    mine, own = counted(optimizer), optimizer.param_groups
    mine.begin(optimizer)
    for n, key in mine.options:
        if key in own[n]:
            groups[n][key] = own[n][key]
    before, attributes = [_seen(group) for group in groups], _seen(vars(optimizer))
    step()
    for n, (group, old) in enumerate(zip(groups, before, strict=True)):
        now = _seen(group)
        for key in [key for key in now if key not in old or now[key] != old[key]]:
            mine.options.add((n, key))
            own[n][key] = group[key]
    now = _seen(vars(optimizer))
    mine.attributes.update(key for key in now if key not in attributes or now[key] != attributes[key])


def saved(optimizer: torch.optim.Optimizer, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the counters as JSON that refers to tensors by number, and the tensors. where: begins error messages."""
    mine, tensors = counted(optimizer), dict[str, Tensor]()
    options = sorted(mine.options)
    name = f"{where}: state_dict: {type(optimizer).__name__} counts in "
    return {
        "state": [
            [key, _plain(value, tensors, f"{name}its state, under {key!r}")]
            for key, value in optimizer.state.items()
            if isinstance(key, str)
        ],
        "options": [
            [n, key, _plain(optimizer.param_groups[n][key], tensors, f"{name}the option {key!r}")] for n, key in options
        ],
        "attributes": [
            [key, _plain(vars(optimizer)[key], tensors, f"{name}its attribute {key!r}")]
            for key in sorted(mine.attributes)
            if key in vars(optimizer)
        ],
    }, tensors


def restore(
    optimizer: torch.optim.Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor], device: torch.device | None,
    groups: Sequence[Group],
) -> None:  # fmt: skip
    """Put back the counters that `saved` has returned. groups: the options in the state."""
    mine = counted(optimizer)
    mine.begin(optimizer)
    # the state has none of these if no step had been made: they are options yet, or are not there
    for n, key in mine.options:
        if key not in mine.keys[n]:
            optimizer.param_groups[n].pop(key, None)
        elif key in groups[n]:
            optimizer.param_groups[n][key] = deepcopy(groups[n][key])
    for key in mine.attributes & set(mine.first):
        setattr(optimizer, key, _value(*mine.first[key], device))
    for key, value in plain["state"]:
        optimizer.state[key] = _value(value, tensors, device)
    for n, key, value in plain["options"]:
        mine.options.add((n, key))
        optimizer.param_groups[n][key] = _value(value, tensors, device)
    for key, value in plain["attributes"]:
        mine.attributes.add(key)
        setattr(optimizer, key, _value(value, tensors, device))


@cache
def _common() -> set[str]:
    """The attributes that every optimizer has, and those that schedulers and the pipeline set."""
    plain = torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=0.1)
    return {*vars(plain), "step", "zero_grad", "_opt_called", "_step_count"}


def _seen(values: dict[str, Any]) -> dict[str, Any]:
    """Return marks of the values, which differ once somebody has changed a value."""
    return {key: _mark(value) for key, value in values.items() if key != "params" and key not in _common()}


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple)):
        return type(value), [_mark(v) for v in value]
    if isinstance(value, dict):
        return [(id(k) if isinstance(k, Tensor) else k, _mark(v)) for k, v in value.items()]
    return value if value is None or isinstance(value, (bool, int, float, str)) else id(value)


def _plain(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return {"list": [_plain(v, tensors, where) for v in value]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(v, tensors, where) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, (int, str)) for k in value):
        return {"dict": [[k, _plain(v, tensors, where)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{where}, in a {type(value).__name__}, which cannot be saved; have it count in numbers, tensors, or lists of "
        "these, or in the state of its weights"
    )


def _value(plain: Any, tensors: dict[str, Tensor], device: torch.device | None) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "tensor":
        value = tensors[str(inner)]
        return value.clone() if value.dim() == 0 else value.to(device, copy=True)
    if kind == "dict":
        return {k: _value(v, tensors, device) for k, v in inner}
    return (tuple if kind == "tuple" else list)(_value(v, tensors, device) for v in inner)
