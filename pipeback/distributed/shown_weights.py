"""Shown weights: while a caller reads or writes the weights of a store, nothing else may move or change them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

HARMLESS = ("wait", "reach")  # since everything was done before the weights were shown


class ShownWeights:
    """The contexts of callers that are open now, within which weights of a store are shown to them."""

    def __init__(self) -> None:
        self._open: list[str] = []

    @contextmanager
    def by(self, call: str | None) -> Iterator[None]:
        """The context of this call; None: the weights stay where stages compute with them."""
        self._open += [] if call is None else [call]
        try:
            yield
        finally:
            del self._open[len(self._open) - (call is not None) :]

    def check(self, what: str = "") -> None:
        """Raise RuntimeError if weights are shown now, unless `what` is harmless then."""
        if self._open and what not in HARMLESS:
            raise RuntimeError(
                f"weights are shown within `with pipe.{self._open[-1]}`, where nothing is trained, drained, committed, "
                "planned or loaded; leave that context first"
            )
