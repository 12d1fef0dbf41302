"""Eligible: says which methods and losses whole ticks can handle: corrections must be numbers, the loss traceable."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch

from pipeback.methods.base import HOOKS, Method, When, described, overrides
from pipeback.schedules.flushes import in_flushes
from pipeback.schedules.programs import Flowing, fills

AMONG = 3  # stages, of which a method is asked what it keeps


def leaps(method: Method) -> bool:
    """Whether a method has ticks at which every stage, or every second one, does the same without calling hooks."""
    return why_not(method) is None


def flushes(method: Method, *, outside: bool = False, shared: bool = False) -> bool:
    """Whether a method consists of flushes or groups, of which a stage can do all micro-batches at once. outside:
    whether the loss is computed outside of the pipeline. shared: whether several workers have parts of the stages; then
    no stage may wait for a backward before its forwards are done.
    """
    if shared and (outside or not fills(method.schedule)):
        return False
    found = in_flushes(method.schedule)
    if found is None or found.slack:
        return found is not None and method.fixed_groups and not outside
    return method.copies == "live" and not any(overrides(method, hook) for hook in HOOKS[:2])


def why_not(method: Method) -> str | None:
    """Why no tick of a method is one function; None if some are."""
    schedule = method.schedule
    if not isinstance(schedule, Flowing):
        told = "between its flushes, stages do different things at a tick"
        return f"{told}; several workers do whole flushes of gpipe alone" if flushes(method) else told
    if not schedule.turns:
        return f"at slack={schedule.slack} stages are not busy at the same ticks"
    if any(method.history(s, AMONG) for s in range(AMONG)) and not method.needs_entry:
        return "its forwards run on older weights than the newest, and no tick looks for these"
    if not described(method) or (method.copies == "stash" and not stashes(method)):
        return "its weights or its update are more than a `pipeback.methods.base.Correction` can say"
    return None


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
