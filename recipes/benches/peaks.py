"""Measures the peak resident memory of a piece of work, above what was resident before, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeback.recipes.resident import resident

FORGET = "5"  # makes the kernel reset the peak, see proc(5), clear_refs


def peak(work: Callable[[], Any]) -> float | None:
    """The peak in MB; None if the system does not tell. What `work` returns is kept alive until it is read."""
    gc.collect()
    trim()
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text(FORGET)
    except OSError:
        return None
    result = work()
    most = resident("VmHWM")
    del result
    return None if before is None or most is None else round(most - before, 3)


def trim() -> None:
    """Return to the system the free memory that the C library has kept, if that library is glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
