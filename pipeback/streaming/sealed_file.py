"""Sealed file: JSON files that begin with their own SHA-256, and calls that return once a file is on the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeback.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk or a quota, or the size that a file may have
SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"checkpoint": (.*)\}\n', re.DOTALL)


def sealed(document: Any) -> bytes:
    """Return a document as JSON, with its SHA-256 before it."""
    body = json.dumps(document).encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"checkpoint": ' + body + b"}\n"


def unsealed(file: Path) -> Any:
    """Return the document in a file that `sealed` wrote. Raises CheckpointError if the file is damaged."""
    with naming(file):
        text = file.read_bytes()
    found = SEALED.fullmatch(text)
    if found is None:
        raise CheckpointError(
            f"{file}: {len(text)} bytes were found, whose beginning or end is wrong: it was truncated or edited; "
            "restore it from a copy"
        )
    check_digest(file, hashlib.sha256(found[2]).hexdigest(), found[1].decode())
    return json.loads(found[2])


def check_digest(file: Path, found: str, written: str) -> None:
    if found != written:
        raise CheckpointError(
            f"{file}: the content was altered: its SHA-256 is {found[:16]}…, was {written[:16]}…; "
            "restore it from a copy"
        )


def digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Return when a file or folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some file systems cannot sync a folder
    finally:
        os.close(opened)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that turns every error into a CheckpointError that begins with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
