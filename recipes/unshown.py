"""Unshown signs: a command does not end at one that its output has no code for, as where that is ASCII."""

from __future__ import annotations

import codecs
import io
import sys

NAME = "pipeback"  # of the error handler


def replaced() -> None:
    """Have standard output write ? for each such sign; the first one is told of, with a cure."""
    codecs.register_error(NAME, _Told())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=NAME)


class _Told:
    """An error handler of codecs, which speaks once."""

    def __init__(self) -> None:
        self.said = False

    def __call__(self, error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        if not self.said:
            self.said = True
            print(
                f"pipeback: the output takes {error.encoding} only, and has ? for other signs; set "
                "PYTHONIOENCODING=utf-8 in front of the command",
                file=sys.stderr,
            )
        return "?" * (error.end - error.start), error.end
