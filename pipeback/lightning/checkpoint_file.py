"""CheckpointFile: a checkpoint of Lightning that replaces the file of before by one rename, once it is on the disk.

Lightning's own goes through a temporary folder. Where that is another file system than the target's, the move is a copy
over the file of before, which a full disk or a kill then leaves cut short, and neither checkpoint is whole.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import CheckpointIO

from pipeback.streaming.sealed_file import FULL, sync

HEAD = b"PK\x03\x04"  # of the archives that torch.save writes; their directory is at the end


class CheckpointFile(CheckpointIO):
    """Writes local files whole or not at all. What Lightning does with URLs, reading and removing stays."""

    def __init__(self) -> None:
        self._other = TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        system, place = url_to_fs(str(path))
        if storage_options is not None or not isinstance(system, LocalFileSystem):
            self._other.save_checkpoint(checkpoint, path, storage_options)
            return
        _write(checkpoint, Path(place))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        try:
            return self._other.load_checkpoint(path, map_location, weights_only)
        except Exception as error:
            if not _cut_short(path):
                raise
            raise ValueError(
                f"{path} is no whole checkpoint: it was cut short, as by a kill or a full disk; give an earlier "
                "checkpoint of the run, or train without ckpt_path="
            ) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        self._other.remove_checkpoint(path)


def _cut_short(path: str | Path) -> bool:
    """Whether a local file is empty, or begins as one of torch.save and lacks the end."""
    system, place = url_to_fs(str(path))
    if not isinstance(system, LocalFileSystem) or not Path(place).is_file():
        return False
    with open(place, "rb") as file:
        return file.read(len(HEAD)) in (b"", HEAD) and not zipfile.is_zipfile(file)


def _write(checkpoint: dict[str, Any], file: Path) -> None:
    """Write a draft beside the file, and rename it. Raises OSError, naming the file, which stays as it was."""
    whole = io.BytesIO()
    torch.save(checkpoint, whole)
    # no part of the file's name, by which a search for last.ckpt could find it
    draft = file.with_name(f".{hashlib.sha256(file.name.encode()).hexdigest()[:16]}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "wb") as stream:
                stream.write(whole.getbuffer())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync(file.parent)
    except OSError as error:
        told = error.strerror or str(error)
        if error.errno in FULL:
            told += "; make room there, or give another folder" + (
                f". The checkpoint of before is whole: ckpt_path={file} goes on from it" if file.is_file() else ""
            )
        raise OSError(error.errno, told, str(file)) from error
