"""What is asked of every fit: the numbers of the event loop on one device, a fit that stopped, and plain Lightning."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import torch

from tests.fuzz.check import TOLERANCE, off
from tests.fuzz.program import Seen
from tests.processes.crew import Crew, Failed

from .fit import Fit
from .train import fitted

REFUSED = (ValueError, TypeError, RuntimeError, FloatingPointError, NotImplementedError)
# what `vectorize=True` may say of a model: that nothing of it can run as one
NOT_AS_ONE = (
    "no stages (can run as one|are alike)|without gradients, but|may look at gradients|would bring all weights|"
    "runs stage by stage"
)
SINGLE = 1e-5  # of metrics that Lightning keeps in float32
HALF = 0.2  # of sums of bfloat16, which are rounded otherwise in stages that run as one


def check(fit: Fit, crew: Crew) -> None:
    """Raise AssertionError, naming what was seen, where a fit shows other numbers than it should."""
    loop, half = fit.by_the_event_loop, fit.precision != "32-true"
    within = (HALF if half else TOLERANCE) if fit.as_one else 0.0
    wanted = _outcome(loop, crew, fit.dtype)
    found = _outcome(fit, crew, fit.dtype)
    if isinstance(wanted, str):
        assert isinstance(found, str), f"the event loop is refused, this is not: {wanted}"
        return
    if isinstance(found, str):
        assert fit.as_one is True and re.search(NOT_AS_ONE, found), f"it is refused: {found}"
        return
    for seen in found:
        _close(seen, wanted[0], within, "the event loop")
    if fit.goes_on:
        for seen in _resumed(fit, crew):
            _close(_tail(seen, found[0]), found[0], within, "a fit that was not stopped")
    if loop.is_plain and not loop.runtime:
        with tempfile.TemporaryDirectory() as folder:
            plain = fitted(loop, folder, fit.dtype, "plainly")
        _close(wanted[0], plain, 0.0, "plain Lightning")


def _outcome(fit: Fit, crew: Crew, dtype: torch.dtype) -> list[Seen] | str:
    """What every device shows, or the error."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _on(fit.runtime, crew, fit, folder, dtype, "whole")
    except (*REFUSED, Failed) as error:
        return f"{type(error).__name__}: {error}"


def _resumed(fit: Fit, crew: Crew) -> list[Seen]:
    with tempfile.TemporaryDirectory() as folder:
        _on(fit.runtime, crew, fit, folder, fit.dtype, "saving")
        return _on(fit.goes_on_with, crew, fit, folder, fit.dtype, "going on")


def _on(options: dict[str, Any], crew: Crew, *asked: Any) -> list[Seen]:
    """What each of the devices of these options shows."""
    devices = options.get("devices", 1)
    return [fitted(*asked)] if devices == 1 else crew.ranks(devices).run(fitted, *asked)


def _tail(resumed: Seen, whole: Seen) -> Seen:
    """What the second Trainer saw at its end, its losses named as those of the whole fit."""
    ends = [(at, value) for at, value in resumed if at.startswith("end: ")]
    losses = [value for at, value in ends if at.startswith("end: loss")]
    before = sum(at.startswith("end: loss") for at, _ in whole) - len(losses)
    assert before >= 0, "it computed more losses than a fit that was not stopped"
    return [(at, v) for at, v in ends if not at.startswith("end: loss")] + [
        (f"end: loss {before + n}", value) for n, value in enumerate(losses)
    ]


def _close(found: Seen, wanted: Seen, within: float, what: str) -> None:
    """All of `found` is in `wanted`, which may have more: weights after each batch, losses of another device."""
    other: dict[str, list[Any]] = {}
    for at, value in wanted:
        other.setdefault(at, []).append(value)
    assert found, "nothing was seen"
    for at, value in found:
        assert other.get(at), f"{at}: not seen by {what}"
        same = other[at].pop(0)
        assert value.shape == same.shape, f"{at}: shape {tuple(value.shape)}, by {what} {tuple(same.shape)}"
        allowed = max(within, SINGLE) if within and "metric" in at else within
        distance = off(value, same)
        assert distance <= allowed, f"{at}: off by {distance:.2g} from {what}"
    missed = [at for at, values in other.items() if values and not re.search(r": (weight|loss|metric) ", at)]
    assert not missed or what.startswith("a fit"), f"{missed[0]}: seen by {what} alone"
