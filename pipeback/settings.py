"""Settings: the modes and numbers that modules hold, by which a forward may begin to draw, or compute something else.

A dropout probability is one. Nobody tells a pipeline when it is set, so it is looked at before every push.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import getitem
from typing import Any

from torch import nn


class Settings:
    """Attributes of modules, as they are now. modes: whether each is set to train; else other numbers, of whole ones 0
    and 1 (the rest are widths and counts).
    """

    def __init__(self, modules: Iterable[nn.Module], *, modes: bool = False) -> None:
        found = [
            (vars(module), key, value)
            for module in modules
            for key, value in vars(module).items()
            if (key == "training") == modes and (type(value) is float or (isinstance(value, int) and value in (0, 1)))
        ]
        self._homes: list[dict[str, Any]] = [home for home, _, _ in found]
        self._keys = [key for _, key, _ in found]
        self._values = [value for _, _, value in found]

    def changed(self) -> bool:
        """Whether one of them is another one, or gone."""
        try:
            return list(map(getitem, self._homes, self._keys)) != self._values
        except KeyError:
            return True

    def odd(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Those that are another one: the attributes of a module, and the name."""
        for home, key, value in zip(self._homes, self._keys, self._values, strict=True):
            if home.get(key, value) != value:
                yield home, key


class Mirror:
    """Copies of modules, which are to have the modes and numbers that somebody sets in the original.

    modules: the original ones, and those of each copy in the same order; they are alike.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]]) -> None:
        self._originals = modules[0]
        self._copies: dict[int, list[dict[str, Any]]] = {}
        for module, *copies in zip(*modules, strict=True):  # one that two stages share has two copies
            self._copies.setdefault(id(vars(module)), []).extend(map(vars, copies))
        self._look()

    def _look(self) -> None:
        self._settings = Settings(self._originals, modes=True), Settings(self._originals)

    def changed(self) -> bool:
        """Whether something was set since the copies followed."""
        return any(settings.changed() for settings in self._settings)

    def follow(self) -> None:
        """Set in the copies what was set in the original; nobody may compute with them meanwhile."""
        for settings in self._settings:
            for home, key in settings.odd():
                for copy in self._copies[id(home)]:
                    copy[key] = home[key]
        self._look()
