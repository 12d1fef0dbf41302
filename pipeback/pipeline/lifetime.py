"""Lifetime: the end of a pipeline, by `close` or with its `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pipeback.pipeline.engine import Engine


class Lifetime:
    """A pipeline that ends: `with Pipeline(...) as pipe:` closes it, however the block ends."""

    _engine: Engine

    def close(self) -> None:
        """Stop worker threads; micro-batches in flight are lost. Over processes this rank leaves the pipeline.

        `with Pipeline(...) as pipe:` does this at its end, also where an error or a `return` ends it.
        """
        self._engine.close()

    @property
    def closed(self) -> bool:
        """Whether an error, `close` or a `with` block has ended the pipeline; `load_state_dict` reopens it."""
        return self._engine.error is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._engine.close(
                "its `with` block has ended, so call drain(), evaluate(), state_dict() and what else needs it "
                "inside the block"
            )
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"closing the pipeline failed, too: {type(another).__name__}: {another}")
