"""Write check: whether the user has written into weights or optimizers since the last look, in whatever runtime.

The library's own writes do not count: autograd is not told of them. An optimizer's state counts as written if an entry
or a velocity was replaced; what is written into its tensors in place is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from pipeback.runtime.loop import Loop
from pipeback.stages.stage import Stage

_writes = attrgetter("_version", "requires_grad")


class WriteCheck:
    """stages: those with the user's modules and optimizers."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        # weights in a store are elsewhere between two pushes, where nobody writes into them
        self._weights = [p for s in stages if s.home.slot is None for p in s.module.parameters()]
        self.remember()

    def remember(self) -> None:
        """The weights are as they should be."""
        self._written = list(map(_writes, self._weights))

    def changed(self, loops: Sequence[Loop]) -> bool:
        """Whether something seems to be written; only where these loops stand still is it sure."""
        if list(map(_writes, self._weights)) != self._written:
            return True
        return any(loop.worker.residence.joins and loop.worker.outside[0].changed() for loop in loops)
