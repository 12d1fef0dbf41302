"""Conditionals: calls of torch.cond within stages and traces.

torch.cond compiles its branches, which neither a trace nor a watch of every operation survives, and whose weights must
not share memory, as those of a stage may, on the device of a store for one. So the branch that is taken is run as it
is written: the same operations on the same values.
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

_cond: Any = torch.cond
_code = _cond.__code__
_compiling = FunctionType(_code, _cond.__globals__, "cond", _cond.__defaults__)  # torch's own, whatever code it has
_here = threading.local()  # the contexts of this thread
_lock = threading.Lock()
_contexts = 0  # of all threads


@contextmanager
def branches_taken(refused: Callable[[], ValueError | None] = lambda: None) -> Iterator[None]:
    """A context within which torch.cond, called by this thread, runs one branch at once.

    refused: the error to raise in place of that, if any. Where there are shapes only, the first branch is run, since
    both return the same shapes.
    """
    global _contexts
    around = _here.__dict__.setdefault("around", [])
    with _lock:
        _contexts += 1
        _cond.__code__ = _redirected.__code__  # the function stays, for modules that have imported it by name
    around.append(refused)
    try:
        yield
    finally:
        around.pop()
        with _lock:
            _contexts -= 1
            if not _contexts:
                _cond.__code__ = _code


def branch_taken(call: Callable[[Any], Any], given: Any) -> Any:
    """Return what `call` makes of an input, within `branches_taken`."""
    with branches_taken():
        return call(given)


@contextmanager
def noticed() -> Iterator[list[None]]:
    """Within `branches_taken`, a list that gets an entry per call of torch.cond."""
    seen: list[None] = []
    with branches_taken(lambda: seen.append(None)):
        yield seen


def _redirected(pred: Any, true_fn: Any, false_fn: Any, operands: tuple[Any, ...] | list[Any] = ()) -> Any:
    from pipeback.splitting.conditionals import taken  # it runs as code of torch's, which has no names of this file

    return taken(pred, true_fn, false_fn, operands)


def taken(pred: Any, true_fn: Any, false_fn: Any, operands: tuple[Any, ...] | list[Any]) -> Any:
    """Run one of the branches of torch.cond, or torch's own where this thread does not watch."""
    around = _here.__dict__.get("around")
    if not around or (isinstance(pred, Tensor) and pred.numel() != 1):
        return _compiling(pred, true_fn, false_fn, operands)  # or its own error
    if (error := around[-1]()) is not None:
        raise error
    return (true_fn if isinstance(pred, FakeTensor) or pred else false_fn)(*operands)
