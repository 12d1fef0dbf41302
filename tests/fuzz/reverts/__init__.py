"""Mendings, each taken back: what the library did before, which the fuzzer must find.

`SEARCHED` are found by the random search (`python -m tests.fuzz --revert NAME`), `REPLAYED` by a hand-written program
of `tests/fuzz/faults` (`python -m tests.fuzz --revert NAME --fault FAULT`).
"""

from __future__ import annotations

from functools import partial

from tests.helpers.mutation import LIBRARY, change

from .replayed import REPLAYED
from .searched import SEARCHED

REVERTS = {**SEARCHED, **REPLAYED}


def take_back(name: str) -> None:
    """In this process, which has not imported the library yet."""
    found = REVERTS[name]
    for module in found.pieces:
        change(module, partial(found.text, module))


def stale() -> dict[str, str]:
    """The reverts that do not fit the library any more, and why."""
    told = {}
    for name, found in REVERTS.items():
        try:
            for module in found.pieces:
                found.text(module, (LIBRARY / f"{module}.py").read_text(encoding="utf-8"))
        except ValueError as error:
            told[name] = str(error)
    return told
