"""Folders: finds whole checkpoints in a folder and the newest of them, and adds new ones.

A checkpoint is a folder `step-00001234` with some files and a `state.json` that names each file's bytes and SHA-256.
It is written in `.step-00001234.partial` and gets its name by one rename, when every byte is on the disk. Other names
exist for moments only, unless a process is killed then: `.step-00001234.replaced` while another checkpoint of the same
step takes its place (it is still a checkpoint), and `.step-00001234.removed` while it is deleted.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pipeback.errors import CheckpointError
from pipeback.streaming.sealed_file import naming, sealed, sync, unsealed

FORMAT = 1  # the format of the files; the state in them has its own
STATE = "state.json"
NAME = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")
LEFT = re.compile(r"\.step-\d{8,}\.(partial|removed)")
HEAD = re.compile(rb'\{"sha256": "[0-9a-f]{64}",\n"checkpoint": \{"format": \d+, "number": (\d+)')


class Draft:
    """A checkpoint that is being written in the folder `partial`; its final path is `path`."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.path = folder, folder / f"step-{step:08d}"
        self.partial = folder / f".{self.path.name}.partial"
        self._lock: int | None = None

    def open(self) -> None:
        """Remove the remains of killed runs, make the partial folder, and lock it while this process lives."""
        with naming(self.folder):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                sync(self.folder.absolute().parent)
            for path in list(self.folder.iterdir()):
                if LEFT.fullmatch(path.name) and not _alive(path):
                    shutil.rmtree(path, ignore_errors=path != self.partial)
                elif path.suffix == ".replaced" and not (home := self.folder / path.stem[1:]).exists():
                    path.rename(home)
        with naming(self.partial):
            self.partial.mkdir()
            self._lock = os.open(self.partial, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def finish(self, content: dict[str, Any]) -> None:
        """Write state.json and give the folder its name. content: its "files" describes the files on the disk."""
        for name, facts in content["files"].items():
            _check_size(self.partial / name, facts["size"])  # so that files of other ranks are visible here
        number = 1 + max((n for path in newest_first(self.folder) if (n := _number(path)) < math.inf), default=0)
        document = {"format": FORMAT, "number": number, **content}
        _json_only(document, "checkpoint")
        with naming(self.partial / STATE):
            (self.partial / STATE).write_bytes(sealed(document))
            sync(self.partial / STATE)
            sync(self.partial)
        with naming(self.path):
            self._rename()

    def _rename(self) -> None:
        aside = self.folder / f".{self.path.name}.replaced"
        if again := self.path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self.path.rename(aside)
        try:
            self.partial.rename(self.path)
        except BaseException:
            if again:
                aside.rename(self.path)
            raise
        sync(self.folder)

    def close(self) -> None:
        """Remove an unfinished folder, if this process has opened it."""
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)  # it is gone if the checkpoint was finished
            os.close(self._lock)
            self._lock = None


def prune(folder: Path, keep: int) -> None:
    """Remove checkpoints older than the newest `keep` whole ones, and replaced ones."""
    kept, found = list(islice(whole(folder), keep)), newest_first(folder)
    older = found[found.index(kept[-1]) + 1 :] if len(kept) == keep else []
    for path in [*older, *(path for path in found if path.suffix == ".replaced" and path not in older)]:
        gone = folder / f".{path.name.strip('.').removesuffix('.replaced')}.removed"
        try:
            path.rename(gone)  # so that a removal cut short leaves no damaged checkpoint
            shutil.rmtree(gone)
        except OSError as error:
            warnings.warn(f"{path}: this old checkpoint could not be removed: {error}", stacklevel=3)


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints for a path: the path itself if it is one, else those in the folder, newest first."""
    return [path] if NAME.fullmatch(path.name) or (path / STATE).exists() else newest_first(path)


def newest_first(folder: Path) -> list[Path]:
    """Return all checkpoints by the time of saving, not by step, since a run may have gone back to an older one.

    Checkpoints that do not record their place come first.
    """
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (_number(path), path.name), reverse=True)


def whole(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints that pass `look`, newest first."""
    for path in newest_first(folder):
        with suppress(CheckpointError):
            look(path)
            yield path


def look(path: Path) -> dict[str, Any]:
    """Return the content of state.json. Raises CheckpointError if it or the size of another file is wrong."""
    file = path / STATE
    document: dict[str, Any] = unsealed(file)
    if document["format"] != FORMAT:
        raise CheckpointError(f"{file}: has format {document['format']}, this pipeback reads {FORMAT}; update pipeback")
    for name, facts in document["files"].items():
        if name in ("", ".", "..") or {"/", os.sep, os.altsep} & set(name):
            raise CheckpointError(
                f"{file}: names {name!r}, which is no file of this folder, and is not followed: it was edited; "
                "restore the folder from a copy"
            )
        _check_size(path / name, facts["size"])
    return document


def _check_size(file: Path, written: int) -> None:
    try:
        found = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; {written} bytes were written") from error
    if found != written:
        raise CheckpointError(f"{file}: {found} bytes were found, {written} were written")


def _number(path: Path) -> float:
    """The place of this save among all saves into its folder; infinite if the checkpoint does not record it."""
    try:
        with open(path / STATE, "rb") as file:
            head = HEAD.match(file.read(200))
    except OSError:
        return math.inf
    return int(head[1]) if head else math.inf


def _alive(path: Path) -> bool:
    """Whether a living process has locked this folder."""
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(opened)
    return False


def _json_only(value: Any, where: str) -> None:
    """Raise TypeError for a value that JSON would refuse or silently change."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is no string; JSON has no others")
            _json_only(inner, f"{where}/{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _json_only(inner, where)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"{where}: a {type(value).__name__} is no JSON value; give numbers, strings, lists and dicts")
