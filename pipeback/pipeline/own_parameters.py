"""Own parameters: an optimizer function is given the parameters of the user's model, and its optimizer then steps the
weights of a stage in their place.

So a function may sort them into groups by what it knows of them: whether a module has them (`p in backbone`), or what
was noted on them (`p.no_decay = True`). A stage steps other tensors, which lie in the same memory or, as masters, have
the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Puts tensors in the places of others, wherever an optimizer holds these."""

    def __init__(self, own: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._others = {id(p): w for p, w in zip(own, weights, strict=True)}
        self._own = {id(p): p for p in own}
        self._seen: set[int] = set()

    def within(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange them in all that an optimizer holds: its groups, its state, and what it has noted itself."""
        if self._first(optimizer):
            held = vars(optimizer)
            held.update({name: self._value(value) for name, value in [*held.items()]})

    def _first(self, value: Any) -> bool:
        first = id(value) not in self._seen
        self._seen.add(id(value))
        return first

    def _value(self, value: Any) -> Any:
        """Return what stands for a value; lists, dictionaries and optimizers stay the objects that they are."""
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if isinstance(value, (tuple, set, frozenset)) and type(value) in (tuple, set, frozenset):
            return type(value)(map(self._value, value))
        if isinstance(value, torch.optim.Optimizer):
            self.within(value)
        elif isinstance(value, list) and self._first(value):
            value[:] = map(self._value, value)
        elif isinstance(value, dict) and self._first(value):
            pairs = [(key, self._value(other)) for key, other in value.items()]
            value.clear()
            value.update((self._value(key), self._cast(key, other)) for key, other in pairs)
        return value

    def _cast(self, p: Any, state: Any) -> Any:
        """The state that an optimizer has made for a parameter, in the type of the weight that it steps instead."""
        if id(p) in self._own and isinstance(state, dict):
            kind = self._others[id(p)].dtype
            like = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() and v.dtype == p.dtype}
            state.update((k, v.to(kind)) for k, v in like.items())
        return state
