"""Bounded cache: values made per form of micro-batch, of which the least recently used is dropped when it is full."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
FORMS = 32  # the graphs of a form take seconds to make (with a compiler a minute) and megabytes to keep


class BoundedCache(dict[K, V]):
    """Values by key, ordered by last use."""

    def used(self, key: K, busy: Collection[Any] = (), most: int | None = None) -> V:
        """Return the value of a key. Beyond `most` (None: FORMS) values, others are dropped that are not busy."""
        self[key] = value = self.pop(key)
        excess = len(self) - (FORMS if most is None else most)
        for old in self.idle({key, *busy})[: max(0, excess)]:
            del self[old]
        return value

    def idle(self, busy: Collection[Any]) -> list[K]:
        """Return the keys that are not busy, least recently used first."""
        return [key for key in self if key not in busy]
