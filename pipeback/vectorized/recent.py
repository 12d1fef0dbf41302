"""Recent: what is made for each form of micro-batch, bounded: what was used longest ago goes when too much is there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
FORMS = 32  # graphs of a form take seconds to make, with a compiler a minute, and some megabytes


class Recent(dict[K, V]):
    """Values by key; the key that was used last is the last one."""

    def used(self, key: K, busy: Collection[Any] = (), most: int | None = None) -> V:
        """Its value. Beyond `most`, others go that are not busy; None: FORMS."""
        self[key] = value = self.pop(key)
        excess = len(self) - (FORMS if most is None else most)
        for old in self.idle({key, *busy})[: max(0, excess)]:
            del self[old]
        return value

    def idle(self, busy: Collection[Any]) -> list[K]:
        """The other ones, that was used longest ago first."""
        return [key for key in self if key not in busy]
