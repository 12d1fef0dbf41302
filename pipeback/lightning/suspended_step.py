"""Suspended step: a call that stops where it asks for something, and goes on when it has the answer.

    caller      ── go_on ┐           ┌ go_on(answer) ┐          ┌─
    the call             └── ask(x) ─┘               └── ... end ┘

The call runs in another thread, but never while its caller runs. What torch keeps per thread (grad mode, autocast,
devices), the context variables and the default dtype come from the caller at first, and then belong to the call.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from pipeback.tensors import accelerators


class TorchModes(NamedTuple):
    """The settings that decide how torch computes in this thread."""

    grad: bool
    inference: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]  # autocast, by type of device
    cache: bool  # of casts
    dtype: torch.dtype  # by default
    device: torch.device  # by default
    stream: torch.Stream | None

    @classmethod
    def now(cls) -> TorchModes:
        kinds = accelerators.kinds()
        casts = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        stream = accelerators.in_use()
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(), torch.get_default_device(), stream,
        )  # fmt: skip

    def set(self) -> None:
        """Set all but inference mode in this thread."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        torch.set_default_dtype(self.dtype)
        if torch.get_default_device() != self.device:
            torch.set_default_device(self.device)
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)  # and its device

    @contextmanager
    def applied(self) -> Iterator[None]:
        outside = TorchModes.now()
        self.set()
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # as the end of `torch.autocast` does
            outside.set()


class _Ended(BaseException):
    """Ends a call that is no longer needed. `except Exception` does not catch it."""


class _Thread(threading.Thread):
    """Runs one call after the other. Locks hand over the turn, which is faster than any other way of Python's."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="pipeback call")
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Callable[[], object] | None = None
        self.modes: TorchModes | None = None  # those that were set last
        self.start()

    def run(self) -> None:
        self.go.acquire()
        while self.work is not None:
            self.work()
            self.work = None
            self.back.release()
            self.go.acquire()

    def leave(self) -> None:
        self.go.release()
        self.join()


class CallThreads:
    """Threads that wait for calls, since starting one takes longer than most calls."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []

    def take(self) -> _Thread:
        return self._idle.pop() if self._idle else _Thread()

    def give(self, thread: _Thread) -> None:
        self._idle.append(thread)

    def end(self) -> None:
        while self._idle:
            self._idle.pop().leave()


class Suspended:
    """Runs `function()` up to its next `ask`, and goes on when it is told to. modes: those of the caller."""

    def __init__(self, function: Callable[[], Any], threads: CallThreads, modes: TorchModes) -> None:
        self.function, self.modes = function, modes  # modes: of the call, when it last asked
        self.question: Any = None
        self.result: Any = None
        self._answer: Any = None
        self._failure: BaseException | None = None
        self._thrown: BaseException | None = None  # raised where it asks
        self._asks = self._over = False
        self._threads = threads
        self._thread: _Thread | None = None  # while it runs

    def go_on(self, answer: Any = None, error: BaseException | None = None) -> bool:
        """Run it until it asks (True) or has its `result` (False); raises what it raises.

        answer, error: what the `ask` at which it stands returns or raises.
        """
        self._answer, self._thrown = answer, error
        if self._thread is None:
            self._thread = self._threads.take()
            self._thread.work = partial(contextvars.copy_context().run, self._run)
        self._turn()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._asks

    def go_on_to(self, kind: type, answer: Any = None) -> bool:
        """Go on until the call asks a question of this kind or ends. This thread calls other questions: functions."""
        asks = self.go_on(answer)
        while asks and not isinstance(self.question, kind):
            try:
                with self.modes.applied():
                    answer = self.question()
            except BaseException as error:
                asks = self.go_on(error=error)
            else:
                asks = self.go_on(answer)
        return asks

    def ask(self, question: Any) -> Any:
        """For the function: show the question to the caller, and wait for the answer."""
        if self._over:
            raise _Ended
        assert self._thread is not None
        self.question, self._asks, self.modes = question, True, TorchModes.now()
        self._thread.back.release()
        self._thread.go.acquire()
        self._asks = False
        if torch.get_default_dtype() != self.modes.dtype:
            torch.set_default_dtype(self.modes.dtype)
        if self._over:
            raise _Ended
        if self._thrown is not None:
            raise self._thrown
        return self._answer

    def end(self) -> None:
        """End the call: an exception is raised where it asks, so that it cleans up."""
        self._over = True
        if self._thread is not None:
            self._turn()
        self._failure = None

    def _turn(self) -> None:
        """Let the call run, and wait for its question or its end."""
        thread, outside = self._thread, torch.get_default_dtype()
        assert thread is not None
        thread.go.release()
        thread.back.acquire()
        if torch.get_default_dtype() != outside:
            torch.set_default_dtype(outside)
        if not self._asks:
            self._thread = None
            self._threads.give(thread)

    def _run(self) -> None:
        assert self._thread is not None
        try:
            if self.modes.inference:
                with torch.inference_mode():
                    self._call()
            else:
                self._call()
        except BaseException as error:
            self._failure = error
        self._asks = False

    def _call(self) -> None:
        self.modes.set()
        self.result = self.function()
