"""Pages: keeps regions of a file that are replaced and never overwritten, so that a commit is one small step.

committed   A0 B0 C0                 what a process that is killed now finds
written     A0 B0 C0 A1 C1           new versions lie beside the old ones, and may be overwritten themselves
committed   .. B0 .. A1 C1           after `commit` the places of A0 and C0 are free
"""

from __future__ import annotations

import ctypes
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.errors import StoreError

PAGE = 4096  # bytes; regions begin at multiples of a page


class Region(NamedTuple):
    """A region of a file. at: its first byte; size: in bytes; crc: the CRC-32 of its content."""

    at: int
    size: int
    crc: int


class Pages:
    """The regions of one file by name. A committed region stays until the next commit."""

    def __init__(self, path: Path, committed: dict[str, Region]) -> None:
        self.path = path
        self.committed, self.newest = dict(committed), dict(committed)
        self.read_bytes = self.written_bytes = 0
        with _naming(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            size = os.fstat(self._file).st_size
        end = max((_end(region) for region in committed.values()), default=0)
        if size < max((r.at + r.size for r in committed.values()), default=0):
            raise StoreError(
                f"{path}: {size} bytes were found, {end} were committed: it was truncated; restore it from a copy"
            )
        self._free: list[tuple[int, int]] = []  # (begin, end) of the free places
        self._end = end
        self._collect()

    def write(self, name: str, memory: Tensor) -> None:
        """Store the bytes of a tensor's storage; the region that was committed under this name stays."""
        buffer = _bytes(memory)
        old = self.newest.get(name)
        again = old is not None and old.size == len(buffer) and self.committed.get(name) != old
        at = old.at if again and old is not None else self._allocate(len(buffer))
        if old is not None and not again:
            self._release(name, old)
        with _naming(self.path):
            done = 0
            while done < len(buffer):
                done += os.pwrite(self._file, buffer[done:], at + done)
        self.newest[name] = Region(at, len(buffer), zlib.crc32(buffer))
        self.written_bytes += len(buffer)

    def read(self, name: str, memory: Tensor) -> None:
        """Fill the run of bytes of a dense tensor. Raises StoreError if the file has other bytes than were written."""
        region = self.newest[name]
        _fill(self._file, self.path, name, region, memory)
        self.read_bytes += region.size

    def drop(self, name: str) -> None:
        """Free the region of this name at the next commit."""
        old = self.newest.pop(name, None)
        if old is not None:
            self._release(name, old)

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        with _naming(self.path):
            os.fsync(self._file)

    def commit(self) -> None:
        """Make the newest regions the committed ones, after the caller has recorded them in a file."""
        self.committed = dict(self.newest)
        self._collect()

    def close(self) -> None:
        os.close(self._file)

    # -- room ----------------------------------------------------------------------------------------------------

    def _release(self, name: str, region: Region) -> None:
        if region.size and self.committed.get(name) != region:
            self._free.append((region.at, _end(region)))

    def _allocate(self, size: int) -> int:
        """Return the smallest free place that is large enough, or else the end of the file."""
        if not size:
            return 0  # an empty region must not count as missing
        need = paged(size)
        fitting = [place for place in self._free if place[1] - place[0] >= need]
        if not fitting:
            at, self._end = self._end, self._end + need
            return at
        best = min(fitting, key=lambda place: place[1] - place[0])
        self._free.remove(best)
        if best[1] - best[0] > need:
            self._free.append((best[0] + need, best[1]))
        return best[0]

    def _collect(self) -> None:
        """Find the free places between the regions; neighbouring ones are joined."""
        self._free, at = [], 0
        taken = {*self.committed.values(), *self.newest.values()}
        for begin, end in sorted((region.at, _end(region)) for region in taken):
            if begin > at:
                self._free.append((at, begin))
            at = max(at, end)
        self._end = at


def read(path: Path, name: str, region: Region) -> Tensor:
    """Return a committed region, also of another process's file: (size,), uint8. Raises StoreError if it is damaged."""
    memory = torch.empty(region.size, dtype=torch.uint8, device="cpu")
    with _naming(path), open(path, "rb") as file:
        _fill(file.fileno(), path, name, region, memory)
    return memory


def _fill(file: int, path: Path, name: str, region: Region, memory: Tensor) -> None:
    buffer, done = _run(memory.data_ptr(), memory.nbytes), 0
    with _naming(path):
        while done < region.size:
            more = os.preadv(file, [buffer[done:]], region.at + done)
            if not more:
                raise StoreError(f"{path}: ends within {name!r}: it was truncated; restore it from a copy")
            done += more
    if zlib.crc32(buffer) != region.crc:
        raise StoreError(
            f"{path}: {name!r} has other content than was written (CRC-32): the disk or somebody has changed it; "
            "restore the folder from a copy, or a checkpoint"
        )


def paged(size: int) -> int:
    """Return the bytes that a region of this size takes in a file."""
    return -(-size // PAGE) * PAGE


def _end(region: Region) -> int:
    return region.at + paged(region.size)


def _bytes(memory: Tensor) -> memoryview:
    storage = memory.untyped_storage()
    return _run(storage.data_ptr(), storage.nbytes())


def _run(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class _naming:
    """A context that turns every OSError into a StoreError that begins with the path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise StoreError(
                f"{self.path}: {error.strerror or error}; what was committed last is whole, make room or give another "
                "folder and start again"
            ) from error
