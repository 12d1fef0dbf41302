"""Measures the peak resident memory of a piece of work, above what was resident before, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeback.recipes.resident import resident

T = TypeVar("T")


class Use(NamedTuple):
    """The memory of a piece of work in MB, above what was resident before; None if the system does not tell."""

    peak: float | None
    held: float | None  # afterwards, when freed memory has been returned to the system
    declared: float | None = None  # what it says that it holds


FORGET = "5"  # makes the kernel reset the peak, see proc(5), clear_refs


def peak(work: Callable[[], Any]) -> float | None:
    """The peak in MB; None if the system does not tell. What `work` returns is kept alive until it is read."""
    return used(work)[1].peak


def used(work: Callable[[], T]) -> tuple[T, Use]:
    """What `work` returns, and the memory that it took."""
    gc.collect()
    trim()
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text(FORGET)
    except OSError:
        return work(), Use(None, None)
    result = work()
    most = resident("VmHWM")
    gc.collect()
    trim()
    after = resident("VmRSS")
    if before is None or most is None or after is None:
        return result, Use(None, None)
    return result, Use(round(most - before, 3), round(after - before, 3))


def trim() -> None:
    """Return to the system the free memory that the C library has kept, if that library is glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
