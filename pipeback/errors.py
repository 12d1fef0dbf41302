"""The errors that can end training, for callers of a pipeline to catch."""

from __future__ import annotations

from typing import Any


class StageError(RuntimeError):
    """An operation failed. The message names the stage and the micro-batch; the cause is chained.

    operation    "forward", "backward" or "update"
    stage        its number, counted from 0
    micro_batch  its number, counted from 0 over all pushes

    Where stages run as one (`vectorize=`), an operation is of several at once; stage and micro_batch are None then.
    """

    def __init__(
        self,
        message: str,
        operation: str | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.operation, self.stage, self.micro_batch = operation, stage, micro_batch


class PushLeftOut(StageError):
    """Pushes have failed and were left out, as if they had not come (`Debug(take_back=...)`). Training goes on.

    pushes  their numbers, as `pipe.pushes` counted them when they came
    loss    the loss of the push that was called, if that one was trained; None if another call has raised this
    """

    def __init__(
        self,
        message: str,
        operation: str | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        pushes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, operation, stage, micro_batch)
        self.pushes = pushes
        self.loss: Any = None


class RankError(RuntimeError):
    """A rank of the pipeline failed: `rank` is its global rank. The message is the same on every rank.

    operation    where it raised a `StageError`: the operation of that; else None
    """

    def __init__(self, message: str, rank: int, operation: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.operation = rank, operation

    def __reduce__(self) -> Any:
        return RankError, (str(self), self.rank, self.operation)


class StoreError(RuntimeError):
    """A file of a store could not be written or read. The message names the file, the cause and the cure."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the rank, the file, the cause and the cure."""
