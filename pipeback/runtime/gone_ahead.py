"""Gone ahead: where the loss is computed outside, which micro-batches have gone forward and not yet backward."""

from __future__ import annotations

from pipeback.methods.base import Method
from pipeback.schedules.programs import flush


class Ahead:
    """Micro-batches that have gone forward and not yet backward (`count`), and which operations may follow."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.count = 0
        self._begun, self._expected = 0, 1  # backward since the schedule began; and how many it was begun for

    def together(self, count: int, arrived: int, expected: int) -> bool:
        """Whether no update lies between the next `count` micro-batches, so that all may go forward at once.

        arrived: micro-batches before them. expected: how many a schedule that begins now expects.
        """
        if count == 1 or any(self.method.delays(2)):
            return count == 1
        pushed = self._expected if self._begun else expected
        every = flush(self.method.schedule_at(arrived, pushed))
        return self._begun % every + count <= every

    def expect(self, expected: int) -> None:
        """Micro-batches are about to go forward; if none has before them, the schedule begins for so many."""
        if not self._begun:
            self._expected = expected

    def forward(self, count: int) -> None:
        """So many have gone forward."""
        self.count = count

    def take(self) -> int:
        """The number that were ahead; now none is."""
        count, self.count = self.count, 0
        return count

    def backward(self, count: int) -> None:
        """So many go backward."""
        self._begun += count

    def restart(self) -> None:
        """The schedule begins anew."""
        self._begun = 0

    def take_up(self, begun: int, expected: int) -> None:
        """Load a state, in which none is ahead."""
        self.count, self._begun, self._expected = 0, begun, expected
