"""What is asked of every program: the numbers of the equations, and the bits of the event loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .models import RANDOM
from .program import Program, Seen

TOLERANCE = 1e-9  # of what float64 rounds differently in another order of sums, over a few dozen updates


def check(program: Program) -> None:
    """Raise AssertionError, naming the call, where a program shows other numbers than it should."""
    plain = replace(program, runtime={})
    numbers = program.model not in RANDOM and all(name != "fill" for name, *_ in program.calls)
    if numbers:
        _close(program.train(), program.expected(), TOLERANCE, "the equations")
    if program.runtime.get("vectorize"):
        if not numbers:
            _close(program.train(), plain.train(), TOLERANCE, "the event loop")
    elif program.runtime:
        _close(program.train(torch.float32), plain.train(torch.float32), 0.0, "the bits of the event loop")
    elif not numbers:
        program.train()


def _close(found: Seen, wanted: Seen, tolerance: float, what: str) -> None:
    assert [at for at, _ in found] == [at for at, _ in wanted], "other calls showed something"
    for (at, value), (_, other) in zip(found, wanted, strict=True):
        assert value.shape == other.shape, f"call {at}: shape {tuple(value.shape)}, by {what} {tuple(other.shape)}"
        if tolerance:
            off = _off(value, other)
            assert off <= tolerance, f"call {at}: off by {off:.2g} from {what}"
        else:
            assert torch.equal(value, other), f"call {at}: off by {_off(value, other):.2g} from {what}"


def _off(value: Any, other: Any) -> float:
    value, other = value.double(), other.double()
    if not (value.isfinite().all() and other.isfinite().all()):
        return 0.0 if torch.equal(value.isfinite(), other.isfinite()) else float("inf")
    return float(((value - other).abs() / (1 + other.abs())).max()) if value.numel() else 0.0
