"""Run options: the optimizers' options with which the micro-batches of a run of ticks came; a schedule changes them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeback.stages.joint_optimizer import Options


class RunOptions:
    """Of each micro-batch that is still needed, and the newest (`now`). known: those of micro-batches in flight, and of
    those to come.
    """

    def __init__(self, known: Mapping[int, Options]) -> None:
        self.known = dict(known)
        self.now = next(iter(known.values()))
        self.uniform = False  # whether all stages use the newest
        self._since = 0  # the first micro-batch that came with the newest

    def of(self, i: int) -> Options:
        """Return those of a micro-batch."""
        return self.known.get(i, self.now)

    def grow(self, come: Mapping[int, Options], oldest: int) -> bool:
        """Take in those of micro-batches that have come, and forget those before `oldest`; return whether the newest
        are others.
        """
        self.known = {i: options for i, options in (self.known | dict(come)).items() if i >= oldest}
        before, self.now = self.now, self.known[max(self.known)]
        self._since = max((i + 1 for i, options in self.known.items() if options is not self.now), default=0)
        self.uniform = self._since <= oldest
        return self.now is not before

    def done(self, oldest: int) -> None:
        """Note that micro-batches before `oldest` are not needed any more."""
        self.uniform = self.uniform or self._since <= oldest
