"""Awaited: values that other threads compute, such as the losses of a push, for whoever reads them later.

One object waits for all values of a push. A future for each would be thousands of objects, which the garbage collector
goes through again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any


class Awaited:
    """The values with these keys, which come one by one and in any order."""

    def __init__(self, keys: Iterable[int]) -> None:
        self.keys = list(keys)
        self._values: dict[int, Any] = {}
        self._there = threading.Event()
        self._error: BaseException | None = None

    def put(self, key: int, value: Any) -> None:
        """Take a value."""
        self._values[key] = value
        if len(self._values) == len(self.keys):
            self._there.set()

    def fail(self, error: BaseException) -> None:
        """Raise the error in all that wait or read later, unless all values have come."""
        if not self._there.is_set():
            self._error = error
            self._there.set()

    @property
    def known(self) -> bool | None:
        """Whether all values have come; None if they never will."""
        return None if self._error is not None else self._there.is_set()

    def values(self, seconds: float | None = None) -> list[Any]:
        """Return the values in the order of their keys. Raises TimeoutError if they have not come after `seconds`."""
        if not self._there.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return [self._values[key] for key in self.keys]
