"""Control flow: calls of torch.cond and torch.while_loop within stages and traces.

Both compile the functions that they are given, which neither a trace nor a watch of every operation survives, and whose
weights must not share memory, as those of a stage may, on the device of a store for one. So they run as they are
written: the branch that is taken, or a loop of Python, with the same operations on the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from pipeback.private import FakeTensor

_here = threading.local()  # the contexts of this thread
_lock = threading.Lock()
_contexts = 0  # of all threads


class _Compiling:
    """A function of torch that compiles what it is given. redirected: one with the same arguments and no closure."""

    def __init__(self, function: Any, redirected: Any) -> None:
        self.function, self.code, self.redirected = function, function.__code__, redirected.__code__
        # torch's own, whatever code it has
        self.own = FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__)


@contextmanager
def as_written(refused: Callable[[str], ValueError | None] = lambda name: None) -> Iterator[None]:
    """A context within which torch.cond and torch.while_loop, called by this thread, run as they are written.

    refused: the error to raise in place of that, if any, by the function's name. Where there are shapes only, the first
    branch is run, since both return the same shapes, and the body of a loop once.
    """
    global _contexts
    around = _here.__dict__.setdefault("around", [])
    with _lock:
        _contexts += 1
        for each in (_cond, _while_loop):
            each.function.__code__ = each.redirected  # the function stays, for modules that have imported it by name
    around.append(refused)
    try:
        yield
    finally:
        around.pop()
        with _lock:
            _contexts -= 1
            for each in (_cond, _while_loop) if not _contexts else ():
                each.function.__code__ = each.code


def run_as_written(call: Callable[[Any], Any], given: Any) -> Any:
    """Return what `call` makes of an input, within `as_written`."""
    with as_written():
        return call(given)


@contextmanager
def noticed() -> Iterator[list[None]]:
    """Within `as_written`, a list that gets an entry per call of these functions."""
    seen: list[None] = []
    with as_written(lambda name: seen.append(None)):
        yield seen


def _redirected_cond(pred: Any, true_fn: Any, false_fn: Any, operands: tuple[Any, ...] | list[Any] = ()) -> Any:
    from pipeback.splitting.control_flow import taken  # it runs as code of torch's, which has no names of this file

    return taken(pred, true_fn, false_fn, operands)


def _redirected_while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    from pipeback.splitting.control_flow import looped

    return looped(cond_fn, body_fn, carried_inputs)


def taken(pred: Any, true_fn: Any, false_fn: Any, operands: tuple[Any, ...] | list[Any]) -> Any:
    """Run one of the branches of torch.cond, or torch's own where this thread is in no context."""
    if _by_torch("torch.cond") or (isinstance(pred, Tensor) and pred.numel() != 1):
        return _cond.own(pred, true_fn, false_fn, operands)  # or its own error
    return (true_fn if isinstance(pred, FakeTensor) or pred else false_fn)(*operands)


def looped(cond_fn: Any, body_fn: Any, carried: Any) -> Any:
    """Run the loop of torch.while_loop, or torch's own where this thread is in no context."""
    if _by_torch("torch.while_loop"):
        return _while_loop.own(cond_fn, body_fn, carried)
    while isinstance(goes_on := cond_fn(*carried), FakeTensor) or goes_on:
        carried = body_fn(*carried)
        if isinstance(goes_on, FakeTensor):
            break
    return carried


def _by_torch(name: str) -> bool:
    around = _here.__dict__.get("around")
    if not around:
        return True
    if (error := around[-1](name)) is not None:
        raise error
    return False


_cond = _Compiling(torch.cond, _redirected_cond)
_while_loop = _Compiling(torch.while_loop, _redirected_while_loop)
