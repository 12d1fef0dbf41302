"""Folder lock: a folder belongs to one command at a time, which writes there.

The system gives it back when the process ends, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"  # of a file that lies in a folder as long as a command writes there


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """A context in which a folder belongs to this command. Raises ValueError if it is that of another one."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    file = _open(out) if fcntl is not None else None
    try:
        yield
    finally:
        if file is not None:
            (out / NAME).unlink(missing_ok=True)
            os.close(file)
        with suppress(OSError):  # something lies there
            for folder in made:
                folder.rmdir()


def _open(out: Path) -> int | None:
    """The file of a folder, which is this command's from now on; None where the disk locks no files."""
    while True:
        file = os.open(out / NAME, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(
                f"out={out}: another command is at work in this folder; wait until it has ended, or give another out="
            ) from None
        except OSError:
            os.close(file)
            (out / NAME).unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(out / NAME)):
                return file
        os.close(file)  # the one that had it has removed it meanwhile
