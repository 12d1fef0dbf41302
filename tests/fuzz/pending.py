"""Faults of `tests/fuzz/faults` that are known and not yet mended, and which programs may meet each.

The search leaves those programs out, and a test sees each fault fail: whoever mends one is told to take it out here.
"""

from __future__ import annotations

from collections.abc import Callable

from .program import Program

PENDING: dict[str, Callable[[Program], bool]] = {}
