"""Resident: the memory of this process, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path


def resident(kind: str) -> float | None:
    """Return MB: "VmRSS" is the present memory, "VmHWM" its peak. None if the system has no /proc."""
    status = Path("/proc/self/status")
    found = re.search(rf"{kind}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 / 1e6 if found else None
