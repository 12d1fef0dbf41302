"""Eligible: says which methods and losses whole ticks can handle: corrections must be numbers, the loss traceable."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch

from pipeback.methods.base import Method, When, described
from pipeback.schedules.programs import Flowing


def leaps(method: Method) -> bool:
    """Whether a method has ticks at which every stage, or every second one, does the same without calling hooks."""
    flows = isinstance(method.schedule, Flowing) and method.schedule.turns > 0
    return flows and described(method) and (method.copies != "stash" or stashes(method))


def stashes(method: Method) -> bool:
    """Whether a method only asks that a backward (B) runs on the weights that its forward (F) used."""
    correction = method.correction(When(0, 1, 0, 0, 0), {})
    return correction is not None and correction.used


def torchs(loss: Any) -> bool:
    """Whether a loss is a function or a module of torch's own, perhaps with some arguments given."""
    if isinstance(loss, partial):
        return torchs(loss.func) and not any(
            isinstance(v, torch.nn.Module) for v in chain(loss.args, loss.keywords.values())
        )
    return str(getattr(loss, "__module__", type(loss).__module__)).startswith("torch.nn")
