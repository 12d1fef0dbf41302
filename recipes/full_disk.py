"""Full disk: an error of writing names the file or the folder, in one sentence; Python names none where it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeback.streaming.sealed_file import FULL


@contextmanager
def writing(place: str | Path | None = None) -> Iterator[None]:
    """A context in which a full disk is an OSError that names this file or folder; None: the one that was typed."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        named = place if place is not None else _typed()
        if named is None:
            raise
        cure = "make room there, and give the command again"
        raise OSError(error.errno, f"{error.strerror}; {cure}", str(named)) from error


def _typed() -> str | None:
    given = [word.removeprefix("out=") for word in sys.argv[1:] if word.startswith("out=")]
    return given[-1] if given else None


def told(error: Exception) -> str:
    """The message of an error; of a full disk without its number."""
    if isinstance(error, OSError) and error.errno in FULL and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
