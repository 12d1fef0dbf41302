"""Outside loss: micro-batches that went forward alone, since their loss is computed outside; and where in a flush."""

from __future__ import annotations

from pipeback.methods.base import Method
from pipeback.schedules.programs import flush
from pipeback.stages.stage import Value


class OutsideLoss:
    """count: micro-batches that have gone forward and not backward. What may come next follows from it."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.count = 0
        self._begun, self._expected = 0, 1  # backward since the schedule began; and how many it was begun for

    def together(self, count: int, arrived: int, expected: int) -> bool:
        """Whether no update lies between the next `count` micro-batches, so that all may go forward at once.

        arrived: micro-batches before them. expected: how many a schedule that begins now is begun for.
        """
        if count == 1 or any(self.method.delays(2)):
            return count == 1
        pushed = self._expected if self._begun else expected
        every = flush(self.method.schedule_at(arrived, pushed))
        return self._begun % every + count <= every

    def expect(self, expected: int) -> None:
        """Some are about to go forward; if none has before them, the schedule begins for so many."""
        if not self._begun:
            self._expected = expected

    def take(self) -> int:
        """How many were ahead; none is any more."""
        count, self.count = self.count, 0
        return count

    def backward(self, count: int) -> None:
        """So many go backward."""
        self._begun += count

    def restart(self) -> None:
        """The schedule begins anew."""
        self._begun = 0

    def take_up(self, begun: int, expected: int) -> None:
        """From a state, in which none is ahead."""
        self.count, self._begun, self._expected = 0, begun, expected


def nothing(gradient: Value) -> bool:
    """Whether a loss does not depend on an output, or on no part of it."""
    return gradient is None or (isinstance(gradient, tuple) and all(part is None for part in gradient))
