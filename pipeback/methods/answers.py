"""Answers: checks what the hooks of a method return, so that a slip is named before anything is computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method, Past, Shift, State
from pipeback.tensors.weight_list import Weights


def initial(method: Method, weights: Weights) -> State:
    """The state of a method before the first micro-batch."""
    with torch.no_grad():
        state = state_of(method, "init", method.init(weights))
    for name, value in state.items() if method.merges else ():
        if isinstance(value, list) and len(value) != len(weights):
            raise ValueError(
                f"init of {method!r} returned a list {name!r} of length {len(value)} for {len(weights)} weights, but "
                "the method merges stages weight by weight; give it one entry per weight, or set merges = False"
            )
    return state


def state_of(method: Method, hook: str, returned: Any) -> State:
    """Return what `init` or `update` has returned. Raises TypeError unless it is a state."""
    if not isinstance(returned, dict):
        cure = "put `return state` at its end" if hook == "update" else "give back {} if there is nothing to keep"
        raise TypeError(
            f"{hook} of {method!r} must return a state, which is a dict, but returned {_said(returned)}; {cure}"
        )
    return returned


def check_count(method: Method, hook: str, weights: Weights, chosen: Any) -> None:
    """Raise TypeError or ValueError unless a hook has chosen a value for every weight. It is cheap."""
    if isinstance(chosen, Past) or _counted(method, weights, chosen):
        return
    told = f"{hook} of {method!r}"
    if isinstance(chosen, Shift):
        _check_length(told, "coefficients", chosen.coefficients, weights)
        _check_length(told, "directions", chosen.directions, weights)
    elif chosen is None and hook == "backward_weights" and method.copies != "stash":
        raise TypeError(
            f'{told} returned None; give back weights, or set copies = "stash", without which `used` is None'
        )
    else:
        _check_length(told, "weights", chosen, weights)
    if method.copies == "live":
        raise ValueError(
            f'{told} returned other weights than the newest, but its copies are "live", which have no room for others; '
            'set copies = "scratch"'
        )


def _counted(method: Method, weights: Weights, chosen: Any) -> bool:
    values = (chosen.coefficients, chosen.directions) if isinstance(chosen, Shift) else (chosen,)
    count = len(weights)
    return method.copies != "live" and all(isinstance(some, (list, tuple)) and len(some) == count for some in values)


def check_shapes(method: Method, hook: str, weights: Weights, chosen: Any) -> None:
    """Raise TypeError or ValueError unless what a hook has chosen for every weight is a tensor of its shape."""
    if isinstance(chosen, Past):
        return
    shifts = isinstance(chosen, Shift)
    if shifts and any(isinstance(c, Tensor) for c in chosen.coefficients):
        raise TypeError(f"{hook} of {method!r} returned a Shift with tensors as coefficients; give plain numbers")
    values: Sequence[Any] = chosen.directions if shifts else chosen
    for n, (w, value) in enumerate(zip(weights, values, strict=True)):
        if value is None and shifts:
            continue
        if not isinstance(value, Tensor) or value.shape != w.shape:
            raise ValueError(
                f"{hook} of {method!r} returned {_said(value)} for weight {n}, which has shape {tuple(w.shape)}; give "
                "a tensor of its shape"
            )


def _check_length(told: str, name: str, values: Any, weights: Weights) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{told} must return weights, a Shift or a Past; give {name} as a list, not as {_said(values)}")
    if len(values) != len(weights):
        raise ValueError(f"{told} returned {len(values)} {name} for {len(weights)} weights; give as many")


def _said(value: Any) -> str:
    if value is None:
        return "None"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
