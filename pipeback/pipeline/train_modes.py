"""Train modes: modules that are set to train or to evaluate while a pipeline still computes with them.

`train()` and `eval()` of such a module wait until what was pushed is done, so that they hold from the next push on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from torch import nn

OTHERWISE = (
    "an attribute of a module was set while it may have been computed with, and it is not known from which micro-batch "
    "on it holds; call pipe.wait() before it is set, or set modes by train() and eval(), which wait"
)


class CallLock:
    """A lock for one caller at a time, who may take it again.

    rest: a context that the caller is in as long as the caller has or awaits the lock, for stages that wait for the
    caller's own code.
    """

    def __init__(self, rest: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._lock, self._owner, self._depth = threading.RLock(), 0, 0
        self._rest = rest
        self._resting: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        resting = nullcontext() if self.mine else self._rest()
        resting.__enter__()
        try:
            self._lock.acquire()
        except BaseException:  # Ctrl-C
            resting.__exit__(None, None, None)
            raise
        if not self._depth:
            self._owner, self._resting = threading.get_ident(), resting
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        resting, again = self._resting, self._depth > 0
        if not again:
            self._owner, self._resting = 0, nullcontext()
        self._lock.release()
        if not again:
            resting.__exit__(None, None, None)

    @property
    def mine(self) -> bool:
        """Whether the thread that asks has it."""
        return self._owner == threading.get_ident()


class Modes:
    """Of the modules of one pipeline. turn: taken by its calls, within which forwards may set their own modules.
    wait: a method that returns when what was pushed is done.
    """

    def __init__(self, modules: Iterable[nn.Module], turn: CallLock, wait: Callable[[], object]) -> None:
        self._modules, self._turn, self._wait = {id(module) for module in modules}, turn, WeakMethod(wait)
        self._caller = 0
        finalize(self, _restore).atexit = False  # a pipeline that is dropped without being closed
        self.pending = False  # whether something may not be done that was pushed

    def pushed(self) -> None:
        """By the thread that is asked to wait; others are the pipeline's own, or do not know what was pushed."""
        self.pending, self._caller = True, threading.get_ident()

    def done(self) -> None:
        """What was pushed."""
        self.pending = False

    @property
    def unheard(self) -> bool:
        """Whether what has been set meanwhile was set without waiting."""
        return self.pending and self in _listening

    def listen(self) -> None:
        """Hear of modules that are set, from now on."""
        with _changing:
            if not hasattr(nn.Module.train, "_pipeback_hears"):
                nn.Module.train = _hearing(nn.Module.train)  # type: ignore[method-assign]
            _listening.add(self)

    def leave(self) -> None:
        self.pending = False
        with _changing:
            _listening.discard(self)
            _restore()

    def hear(self, module: nn.Module) -> None:
        """It is about to be set."""
        if self.pending and id(module) in self._modules and threading.get_ident() == self._caller:
            wait = None if self._turn.mine else self._wait()
            if wait is not None:
                wait()


_listening: WeakSet[Modes] = WeakSet()
_changing = threading.RLock()  # the garbage collector may come to `_restore` while its thread holds it


def _restore() -> None:
    """Torch's own function, where nobody who listens is alive."""
    with _changing:
        original = getattr(nn.Module.train, "_pipeback_hears", None)
        if original is not None and not list(_listening):  # the list leaves out those that have just gone
            nn.Module.train = original  # type: ignore[method-assign]


def _hearing(original: Any) -> Any:
    @functools.wraps(original)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        for modes in list(_listening):
            modes.hear(self)
        found: nn.Module = original(self, mode)
        return found

    train._pipeback_hears = original  # type: ignore[attr-defined]
    return train
