"""The errors that training may end with: what the caller of a pipeline catches."""

from __future__ import annotations

from typing import Any


class StageError(RuntimeError):
    """An operation failed; the message names stage and micro-batch, the cause is chained."""


class RankError(RuntimeError):
    """A rank of the pipeline is at fault, the global rank `rank`; the message is the same on every rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> Any:
        return RankError, (str(self), self.rank)


class StoreError(RuntimeError):
    """A store's file that could not be written or read; the message names file, cause and cure."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message names rank, file, cause and cure."""
