"""What is asked of every program: the numbers of the equations, and the bits of the event loop."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from .plain import is_plain, trained_plainly
from .program import Program, Seen

# models that are known to run as one do not fail as one
BROKEN = "torch cannot (run|write) |does not depend on their input"
TOLERANCE = 1e-9  # of what float64 rounds differently in another order of sums, over a few dozen updates


def check(program: Program) -> None:
    """Raise AssertionError, naming the call, where a program shows other numbers than it should."""
    if program.refused:
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises((ValueError, TypeError), match=program.refused):
                program.train(dtype)
        return
    if program.runtime.get("vectorize") is True and _refused_as_one(program):
        return
    plain = replace(program, runtime={})
    if program.has_equations:
        close(program.train(), program.expected(), TOLERANCE, "the equations")
    if program.runtime.get("vectorize"):
        if not program.has_equations:
            close(program.train(), plain.train(), TOLERANCE, "the event loop")
    elif program.runtime:
        close(program.train(torch.float32), plain.train(torch.float32), 0.0, "the bits of the event loop")
    elif not program.has_equations:
        program.train()
    if any(name == "cast" for name, *_ in program.calls):
        _check_early(plain)
    if is_plain(plain):
        close(plain.train(torch.float32), trained_plainly(plain, torch.float32), 0.0, "the bits of plain training")


def _refused_as_one(program: Program) -> bool:
    """Whether it is refused since no stages may run as one; the types in which constants round alike tell the same."""
    found = []
    for dtype in (torch.float64, *([torch.bfloat16] if program.model == "scaled" else [])):
        try:
            program.train(dtype)
            found.append(False)
        except ValueError as error:
            if re.search(BROKEN, str(error)) or not re.search("no stages (can run as one|are alike)", str(error)):
                raise
            found.append(True)
    assert len({*found}) == 1, "stages are alike in one type, and not in another"
    return found[0]


def _check_early(program: Program) -> None:
    """What is met late is refused or trained as where it is met first."""
    forms = sorted({call[:2] for call in program.calls if call[0] in ("push", "cast")})
    early = replace(program, calls=(*[("rehearse", *form) for form in forms], *program.calls))
    late, first = (_outcome(each) for each in (program, early))
    if isinstance(late, str) or isinstance(first, str):
        assert late == first, f"{late if isinstance(late, str) else 'it trains'}; had it been met first: {first}"
    else:
        close([("", value) for _, value in late], [("", value) for _, value in first], 0.0, "where all forms are known")


def _outcome(program: Program) -> Seen | str:
    try:
        return program.train(torch.float32)
    except ValueError as error:
        if "function of" not in str(error):
            raise
        return "it is refused"


def close(found: Seen, wanted: Seen, tolerance: float, what: str) -> None:
    assert [at for at, _ in found] == [at for at, _ in wanted], "other calls showed something"
    for (at, value), (_, other) in zip(found, wanted, strict=True):
        assert value.shape == other.shape, f"call {at}: shape {tuple(value.shape)}, by {what} {tuple(other.shape)}"
        if tolerance:
            distance = off(value, other)
            assert distance <= tolerance, f"call {at}: off by {distance:.2g} from {what}"
        else:
            assert torch.equal(value, other), f"call {at}: off by {off(value, other):.2g} from {what}"


def off(value: Any, other: Any) -> float:
    """How far two tensors are apart, of their size; not finite where only one of them is finite."""
    value, other = value.double(), other.double()
    if not (value.isfinite().all() and other.isfinite().all()):
        return 0.0 if torch.equal(value.isfinite(), other.isfinite()) else float("inf")
    return float(((value - other).abs() / (1 + other.abs())).max()) if value.numel() else 0.0
