"""Faults of `faults.py` that are known and not yet mended, and which programs may meet each.

The search leaves those programs out, and a test sees each fault fail: whoever mends one is told to take it out here.
"""

from __future__ import annotations

from collections.abc import Callable

from .program import Program


def _never(program: Program) -> bool:
    return False


def _calls(program: Program, *names: str) -> bool:
    return any(name in names for name, *_ in program.calls)


def _threads(program: Program) -> bool:
    return _calls(program, "eval", "train") and bool(program.runtime.get("workers") or program.options.get("replicas"))


PENDING: dict[str, Callable[[Program], bool]] = {
    "eval() between pushes with workers takes effect at a random time": _threads,
}
