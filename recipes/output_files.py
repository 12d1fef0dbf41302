"""Files that a command writes at its end: whether they can be written is asked before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path


def writable(option: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written, before anything is trained."""
    if path.is_dir():
        raise ValueError(f"{option}={path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option}={path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={path} cannot be written: permission denied")
