"""Attribute reads: plain attributes of modules on which a forward has decided; its stages know only the outcome.

Such an attribute is a number, a string, a mode (`if self.training`) or a function, and tracing has fixed its value.
When somebody sets another value, the model is traced again; with the old value, the old scripts are used again.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeback.splitting.module_walk import walked

Name = tuple[str, str]  # of an attribute: the path of its module, and its own


class AttributeReads:
    """Gives a number to each combination of values on which a forward decides: equal numbers mean equal values."""

    def __init__(self) -> None:
        self._names: dict[Name, nn.Module] = {}
        self._states: list[list[Any]] = []

    def add(self, names: Collection[Name], paths: Mapping[str, nn.Module]) -> None:
        """Add attributes that a forward has read; earlier traces have not read them and do not depend on them.

        paths: the modules by their paths.
        """
        new = {name: paths[name[0]] for name in sorted(names) if name not in self._names and name[0] in paths}
        for state in self._states:
            state += [_kept(getattr(module, key, None)) for (_, key), module in new.items()]
        self._names.update(new)

    def number(self, training: bool | None = None) -> int:
        """Return the number of the present values. training: the mode to assume for all modules; None: their own."""
        now = [getattr(module, key, None) for (_, key), module in self._names.items()]
        if training is not None:
            now = [training if key == "training" else x for (_, key), x in zip(self._names, now, strict=True)]
        for number, state in enumerate(self._states):
            if _same(now, state):
                return number
        self._states.append([_kept(value) for value in now])
        return len(self._states) - 1


@contextmanager
def modes(model: nn.Module, training: bool | None) -> Iterator[None]:
    """A context within which every module is in this mode (True: training); None leaves each in its own."""
    before = [(m, m.training) for m in walked(model).values()]
    try:
        for m, _ in before if training is not None else ():
            m.training = bool(training)
        yield
    finally:
        for m, mode in before:
            m.training = mode


def _same(now: list[Any], state: list[Any]) -> bool:
    try:
        return bool(now == state) and list(map(type, now)) == list(map(type, state))
    except (RuntimeError, ValueError):  # lists of tensors cannot be compared by ==
        return all(a is b for a, b in zip(now, state, strict=True))


def _kept(value: Any) -> Any:
    """Return a copy of lists and dictionaries, which may be changed in place, and any other value itself."""
    return copy.copy(value) if isinstance(value, (list, dict)) else value
