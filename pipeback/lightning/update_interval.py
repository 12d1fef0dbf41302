"""The update interval: `accumulate_grad_batches` in the micro-batches of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeback import methods
from pipeback.lightning import lightning_internals
from pipeback.methods.base import Method
from pipeback.pipeline.method_choice import named


class UpdateInterval:
    """How many micro-batches of a method make one update.

    Methods that flush once per push (gpipe, one_f_one_b) flush at every optimizer step of Lightning.
    Those with a fixed interval (pipedream_2bw, pipemare) count accumulate_grad_batches times the micro-batches of a
    batch, unless they were built with a number. The others update after every micro-batch.

    updates: returns how many the whole training will make, or None if that is not known.
    """

    def __init__(self, method: str | Method, updates: Callable[[], int | None] = lambda: None) -> None:
        self._given, self._updates = method, updates
        self._batches: int | None = None  # accumulate_grad_batches, where it must not change
        self._waits = False  # whether a batch has gone backward whose step has not come

    @property
    def known(self) -> bool:
        """Whether the method can be built before the first batch shows how many micro-batches make an update."""
        return not self._counts()

    def method(self, batches: int, per_batch: int) -> Method:
        """The method for `accumulate_grad_batches=batches` and `per_batch` micro-batches per batch."""
        wanted = batches * per_batch
        given = self._given
        if isinstance(given, str) and self._counts():
            made = named(given, wanted, self._updates() if methods.derived(given, 1, 1) else None, micro_batches=wanted)
        else:
            made = methods.create(given) if isinstance(given, str) else given
        if made.flush_each_push:
            return made
        self._batches = batches
        found = getattr(made, "micro_batches", None)
        if batches > 1 and found is None:
            raise ValueError(
                f"accumulate_grad_batches={batches}: {made!r} updates after every micro-batch; use 1, or a method with "
                "an update interval: method='gpipe', 'one_f_one_b' or 'pipedream_2bw', or "
                f"method=pipeback.methods.create('pipemare', anneal=1000, micro_batches={wanted})"
            )
        if batches > 1 and found != wanted:
            raise ValueError(
                f"accumulate_grad_batches={batches} asks for an update every {wanted} micro-batches, but the method "
                f"was built with micro_batches={found}; leave one of them out"
            )
        return made

    def updates(self, method: Method, per_batch: int) -> int | None:
        """How many updates a stage makes in the whole training, if its length is known."""
        steps = self._updates()
        if steps is None or method.flush_each_push or getattr(method, "micro_batches", None) is not None:
            return steps
        return steps * per_batch

    def backward_begins(self, trainer: Any) -> None:
        """Hear that a batch goes backward."""
        self._waits = lightning_internals.steps_now(trainer)

    def step_done(self) -> None:
        """Hear that the optimizer has stepped."""
        self._waits = False

    def check(self, batches: int) -> None:
        """Raise if accumulate_grad_batches has changed during fit and the method has a fixed update interval, or if
        the batch before has gone backward and no step of the optimizer has come.
        """
        if self._waits:
            raise ValueError(
                "optimizer_step has run its closure, but no step of the optimizer: the batch has gone backward through "
                "the stages, which will update with it; to leave a batch out, return -1 from on_train_batch_start, "
                "and call optimizer.step(closure=optimizer_closure) for the others"
            )
        if self._batches is not None and batches != self._batches:
            raise ValueError(
                f"accumulate_grad_batches changed from {self._batches} to {batches} during fit, but the update "
                "interval of a pipeline that does not flush is fixed; leave it, or use gpipe or one_f_one_b"
            )

    def _counts(self) -> bool:
        """Whether the method is named, not built, and counts micro-batches."""
        if not isinstance(self._given, str):
            return False
        option = methods.options(self._given).get("micro_batches")
        return option is not None and option.default is not None
