"""Settings: the modes and numbers that modules hold, by which a forward may begin to draw, or compute something else.

A dropout probability is one. Nobody tells a pipeline when it is set, so it is looked at before every push.
"""

from __future__ import annotations

from collections.abc import Iterable
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
