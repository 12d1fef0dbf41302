"""A mending of the library that is taken back: pieces of its text, with what stood there before."""

from __future__ import annotations

from typing import Any, NamedTuple


class Revert(NamedTuple):
    """pieces: of each module of the library, (text, what stands there instead). where: which programs are searched, as
    `strategies.programs` takes it: those of one optimizer, model or runtime, or with a call more often.
    """

    pieces: dict[str, tuple[tuple[str, str], ...]]
    where: dict[str, Any]

    def text(self, module: str, text: str) -> str:
        """The module's text with it. Raises ValueError where a piece is not there once: the mending looks otherwise."""
        for piece, instead in self.pieces[module]:
            if text.count(piece) != 1:
                raise ValueError(f"pipeback/{module}.py has {piece!r} {text.count(piece)} times; write it anew")
            text = text.replace(piece, instead)
        return text


def revert(module: str, *pieces: tuple[str, str], **where: Any) -> Revert:
    return Revert({module: pieces}, where)
