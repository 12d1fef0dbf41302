"""Replayed: a configuration of the search, whose repr is Python that makes it again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Replayed:
    """A dataclass without a repr of its own, all of whose fields have defaults."""

    def __repr__(self) -> str:
        plain, own = type(self)(), fields(self)  # type: ignore[arg-type]
        given: list[Any] = [f.name for f in own if getattr(self, f.name) != getattr(plain, f.name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    @property
    def command(self) -> str:
        """What replays it."""
        return f'python -m tests.fuzz "{self!r}"'
