"""Autocast regions: calls of a traced forward whose autocast setting differs from that around the model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from pipeback.tensors import accelerators

Autocast = tuple[tuple[str, torch.dtype | None], ...]  # a type for each kind of device; None where it is off


def autocasts() -> Autocast:
    """Return the autocast setting of this thread."""
    return _now(accelerators.kinds())


def other(around: Autocast) -> Autocast:
    """Return the part of the present autocast setting that differs from `around`."""
    return tuple(now for now in _now(kind for kind, _ in around) if now not in around)


def _now(kinds: Iterable[str]) -> Autocast:
    return tuple((k, torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None) for k in kinds)


class Entered:
    """Enters autocast when it is called, before a run of calls in a stage, and leaves it when it is called again."""

    __name__, __module__ = "autocast", "pipeback"

    def __init__(self, autocast: Autocast) -> None:
        self.expects = autocast
        self._stack: ExitStack | None = None

    def __call__(self, *_: Any) -> None:
        if self._stack is not None:
            self.close()
            return
        self._stack = ExitStack()
        for kind, dtype in self.expects:
            self._stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))

    def close(self) -> None:
        """Leave autocast if it was entered."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
