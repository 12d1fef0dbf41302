"""Kept states: what an engine tells whoever keeps states of it, to go back to one if a push fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipeback.runtime.loop import Batch


class KeptStates(Protocol):
    """States that are kept for a push that fails (`take_back`)."""

    def note(self, batches: Sequence[Batch]) -> None:
        """Keep a push that is about to be let in, and the state before it, if that is due."""

    def handed(self, loss: Tensor) -> Tensor:
        """The loss of the push that was let in last, as the user gets it."""

    def rests(self) -> None:
        """Nothing works until the next call."""

    def forget(self) -> None:
        """What came until now cannot be taken back, or is done."""

    def recover(self, error: BaseException) -> str:
        """Train again without the push that has failed, and raise an error that says so.

        If that cannot be, return why, for the message of the closed pipeline.
        """

    def settle(self, what: str, *, warn: bool = True) -> None:
        """Return when what was pushed is done on all ranks; warn of pushes that are left out. what: the call."""
