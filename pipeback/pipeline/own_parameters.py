"""Own parameters: an optimizer function is given the parameters of the user's model, and its optimizer then steps the
weights of a stage in their place.

So a function may sort them into groups by what it knows of them: whether a module has them (`p in backbone`), or what
was noted on them (`p.no_decay = True`). A stage steps other tensors, which lie in the same memory or, as masters, have
the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor


class OfWeights:
    """An optimizer function that is given the weights themselves, which the stages step."""


def stepping(
    make: Callable[[list[Any]], torch.optim.Optimizer], own: Sequence[Tensor], weights: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer that `make` makes of the parameters `own`, with `weights` in the place of each."""
    made = make(list(own))
    if isinstance(made, torch.optim.Optimizer):
        _InTheirPlaces(own, weights).within(made)
    return made


class _InTheirPlaces:
    """Puts tensors in the places of others, wherever an optimizer holds these. Groups and states stay the objects that
    they are, since others may share them; other containers may be the user's, and are replaced.
    """

    def __init__(self, own: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._others = {id(p): w for p, w in zip(own, weights, strict=True)}
        self._shared: set[int] = set()
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity: what was met, and what stands for it

    def within(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange them in all that an optimizer holds: its groups, its state, and what it has noted itself."""
        if id(optimizer) in self._known:
            return
        self._known[id(optimizer)] = optimizer, optimizer
        groups, state = optimizer.param_groups, optimizer.state
        kept = [groups, state, *groups, *(group["params"] for group in groups), *state.values()]
        self._shared |= set(map(id, kept))
        held = vars(optimizer)
        held.update({name: self._value(value) for name, value in [*held.items()]})

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if isinstance(value, torch.optim.Optimizer):
            self.within(value)
        elif type(value) in (tuple, set, frozenset):
            return type(value)(map(self._value, value))
        elif isinstance(value, (list, dict)):
            if id(value) not in self._known:
                self._known[id(value)] = value, value  # it may hold itself
                found = self._list(value) if isinstance(value, list) else self._dict(value)
                self._known[id(value)] = value, found
            return self._known[id(value)][1]
        return value

    def _list(self, value: list[Any]) -> list[Any]:
        found = list(map(self._value, value))
        if all(map(is_, found, value)):
            return value
        mine = value if id(value) in self._shared else copy.copy(value)
        mine[:] = found
        return mine

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        found = [(self._value(key), self._cast(key, self._value(other))) for key, other in value.items()]
        pairs = zip(found, value.items(), strict=True)
        if all(key is old and other is before for (key, other), (old, before) in pairs):
            return value
        mine = value if id(value) in self._shared else copy.copy(value)
        mine.clear()
        mine.update(found)
        return mine

    def _cast(self, p: Any, state: Any) -> Any:
        """The state that an optimizer has made for a parameter, in the type of the weight that it steps instead."""
        if id(p) in self._others and isinstance(state, dict):
            kind = self._others[id(p)].dtype
            like = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() and v.dtype == p.dtype}
            state.update((k, v.to(kind)) for k, v in like.items())
        return state
