"""Write check: whether the user has written into weights or optimizers between two pushes, in whatever runtime.

The library's own writes into weights do not count: autograd is not told of them. An optimizer's state is compared from
when everything stands still to the next push; it was written if an entry or a velocity was replaced. What is written
into its tensors in place is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from pipeback.runtime.optimizer_state_watch import Glance
from pipeback.stages.stage import Stage

_writes = attrgetter("_version", "requires_grad")


class WriteCheck:
    """stages: those with the user's modules and optimizers."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        # weights in a store are elsewhere between two pushes, where nobody writes into them
        self._stages = [stage for stage in stages if stage.home.slot is None]
        self._weights = [p for stage in self._stages for p in stage.module.parameters()]
        self._glance: Glance | None = None
        self.remember()

    def remember(self) -> None:
        """The weights are as they should be."""
        self._written = list(map(_writes, self._weights))

    def rests(self) -> None:
        """Nothing works from now to the next push."""
        if self._glance is None or not self._glance.same():
            self._glance = Glance(self._stages)

    def works(self) -> None:
        """Something may write from now on."""
        self._glance = None

    @property
    def weights(self) -> bool:
        """Whether weights seem to be written; a thread amid an update has other versions for a moment."""
        return list(map(_writes, self._weights)) != self._written

    @property
    def optimizers(self) -> bool:
        """Whether the state of an optimizer was written since everything stood still."""
        return self._glance is not None and not self._glance.same()
