"""Autocast regions: calls of a traced forward whose autocast setting differs from that around the model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from pipeback.tensors import accelerators

Autocast = tuple[tuple[str, torch.dtype | None], ...]  # a type for each kind of device; None where it is off


def autocasts() -> Autocast:
    """Return the autocast setting of this thread."""
    return tuple((kind, _now(kind)) for kind in accelerators.kinds())


def other(around: Autocast) -> Autocast:
    """Return the part of the present autocast setting that differs from `around`."""
    found = []
    for kind, was in around:
        if (now := _now(kind)) != was:
            found.append((kind, now))
    return tuple(found)


def _now(kind: str) -> torch.dtype | None:
    """The type to which autocast casts on devices of this kind; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
