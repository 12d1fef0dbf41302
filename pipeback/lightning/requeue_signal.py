"""The signal by which SLURM tells that it will end a job: Lightning saves a checkpoint and has the job queued again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from pipeback.lightning import lightning_internals


class RequeueSignal(Callback):
    """Puts Lightning's handler off to the end of the batch: amid a batch, micro-batches of it are in the pipeline, and
    a run that goes on from a checkpoint would train on them again.
    """

    def __init__(self) -> None:
        self._amid = False  # a batch
        self._handle: Callable[..., Any] | None = None
        self._came: tuple[Any, ...] | None = None

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Take the signal in place of the handler that the Trainer has given it, which hears of it in time."""
        self._amid, self._came = False, None
        number = lightning_internals.requeue_signal(trainer)
        if number is None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(number)
        if callable(handler) and handler != self._come:
            self._handle = handler
            signal.signal(number, self._come)

    def on_train_batch_start(self, *_: Any) -> None:
        self._amid = True

    def on_train_batch_end(self, *_: Any) -> None:
        self._between()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._between()

    def _come(self, *given: Any) -> None:
        self._came = given
        if not self._amid:
            self._between()

    def _between(self) -> None:
        self._amid = False
        came, self._came = self._came, None
        if came is not None and self._handle is not None:
            self._handle(*came)


def put_off(trainer: Any) -> None:
    """Have the signal of SLURM, if the Trainer hears it, handled between two batches."""
    if lightning_internals.requeue_signal(trainer) is None:
        return
    if not any(isinstance(each, RequeueSignal) for each in trainer.callbacks):
        trainer.callbacks.append(RequeueSignal())  # behind those that save checkpoints, too
