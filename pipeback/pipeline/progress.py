"""Progress: the pushes that training has seen, and whether it begins anew although a state was loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.counts import counted
from pipeback.runtime.loop import Batch
from pipeback.tensors.checksum import checksum


class Progress:
    """Counts pushes, and remembers the first x.

    A loop that begins at 0 after a state was loaded trains on its first batches twice. This is told where it can be
    known: the first x after loading is the very first x of training, nobody has asked where training stands, and
    training did not begin with one x several times over.
    """

    def __init__(self) -> None:
        self.pushes = 0
        self._first: int | None = None  # a checksum of the first x; None: it says nothing
        self._asked = True  # whether the user has asked since a state was loaded

    def ask(self) -> None:
        """The user asks where training stands."""
        self._asked = True

    def push(self, batches: Sequence[Batch]) -> None:
        """Count a push that is about to be let in, and warn if training begins at its first data again."""
        if self.pushes < 2 or not self._asked:
            seen = _seen(batches[0][0])
            if self.pushes == 0:
                self._first = seen
            elif self._first is not None and seen == self._first:
                if not self._asked:
                    warnings.warn(
                        f"the state that was loaded has seen {counted(self.pushes, 'push')}, and the first x after "
                        "it is the "
                        "first x of training: if this is a loop that begins at 0 again, begin it at pipe.pushes, for "
                        "example for step in range(pipe.pushes, steps); if data come round again, read pipe.pushes "
                        "after loading, and this is not said",
                        stacklevel=4,
                    )
                elif self.pushes == 1:
                    self._first = None  # data repeat
            self._asked = True
        self.pushes += 1

    def came(self, count: int) -> None:
        """Count micro-batches whose loss is computed outside, each as a push."""
        self.pushes += count

    def plain(self) -> dict[str, Any]:
        """The part of a state that belongs here, as JSON values."""
        return {"pushes": self.pushes, "first": self._first}

    def take_up(self, plain: Mapping[str, Any]) -> None:
        """Load what `plain` has returned; a state without it was pushed in pushes of one size, as far as is known."""
        each = max([1, *(place.get("pushed", 1) for place in plain["loops"])])
        self.pushes = plain.get("pushes", plain["arrived"] // each)
        self._first, self._asked = plain.get("first"), not self.pushes


def _seen(x: Any) -> int | None:
    """A checksum of the first micro-batch of a push; None if it cannot be read."""
    parts = x if isinstance(x, tuple) else (x,)
    plain = all(type(part) is Tensor and part.layout is torch.strided and not part.is_meta for part in parts)
    return checksum(parts) if plain else None
