"""Suspended step: a call that stops where it asks for something, and goes on when it has the answer.

    caller      ── go_on ┐           ┌ go_on(answer) ┐          ┌─
    the call             └── ask(x) ─┘               └── ... end ┘

The call runs in its caller's thread, on a stack of its own (a greenlet). The grad mode, autocast, the devices, the
context variables and the default dtype come from the caller at first, and then belong to the call.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet

from pipeback.private import dispatch_modes, function_modes, pop_function_mode, push_function_mode
from pipeback.tensors import accelerators

MODE = (
    "training_step calls the model within {mode}, which would see other micro-batches, too, where stages run as one or "
    "visit a store; leave it out, or use vectorize=False and store=None"
)
_CPU = torch.device("cpu")


class TorchModes(NamedTuple):
    """The settings that decide how torch computes in this thread."""

    grad: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]  # autocast, by type of device
    cache: bool  # of casts
    dtype: torch.dtype  # by default
    device: torch.device  # by default
    stream: torch.Stream | None

    @classmethod
    def now(cls) -> TorchModes:
        kinds = accelerators.kinds()
        casts = tuple([(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds])
        device = torch.get_default_device() if function_modes() else _CPU  # a default is one of these modes
        return cls(
            torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), torch.get_default_dtype(), device,
            accelerators.in_use() if len(kinds) > 1 else None,
        )  # fmt: skip

    def set(self) -> None:
        """Set them in this thread."""
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


class Suspended:
    """Runs `function()` up to its next `ask`, and goes on when it is told to. modes: those of the caller."""

    def __init__(self, function: Callable[[], Any], modes: TorchModes) -> None:
        self.function, self.modes = function, modes  # modes: of the call, when it last asked
        self._device = modes.device  # by default, but for the contexts of the call's own
        self.asks = False
        self.question: Any = None
        self.result: Any = None
        self._answer: Any = None
        self._failure: BaseException | None = None
        self._over = False
        self._call: greenlet | None = None  # while it runs
        self._around: list[Any] = []  # modes for torch functions and operators that its caller is in

    def go_on(self, answer: Any = None) -> bool:
        """Run it until it asks (True) or has its `result` (False); raises what it raises.

        answer: what the `ask` at which it stands returns.
        """
        self._answer = answer
        self._turn()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self.asks

    def ask(self, question: Any) -> Any:
        """For the function: show the question to the caller, and wait for the answer."""
        if self._over:
            raise _Ended
        if seeing := _others(dispatch_modes(), self._around):
            raise ValueError(MODE.format(mode=type(seeing[-1]).__name__))
        assert self._call is not None
        self.question, self.asks, self.modes = question, True, TorchModes.now()
        every = function_modes()
        mine = _others(every, self._around)
        for _ in every if mine else ():
            pop_function_mode()
        for mode in _others(every, mine) if mine else ():
            push_function_mode(mode)
        self._call.parent.switch()
        for mode in mine:
            push_function_mode(mode)
        self.asks = False
        if self._over:
            raise _Ended
        return self._answer

    def end(self) -> None:
        """End the call: an exception is raised where it asks, so that it cleans up."""
        self._over = True
        if self._call is not None:
            self._turn()
        self._failure = None

    def _turn(self) -> None:
        """Let the call run, and wait for its question or its end."""
        outside, self._around = TorchModes.now(), [*function_modes(), *dispatch_modes()]
        if self._call is None:
            self._call = greenlet(self._run)
            self._call.gr_context = contextvars.copy_context()
        self._call.parent = getcurrent()
        wanted = self.modes._replace(device=self._device)
        if wanted != outside:
            wanted.set()
        self._call.switch()
        now = self.modes._replace(device=self._device) if self.asks else TorchModes.now()
        if now != outside:
            outside.set()
        if not self.asks:
            self._call = None

    def _run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self._failure = error


def _others(modes: list[Any], known: list[Any]) -> list[Any]:
    return [mode for mode in modes if all(mode is not one for one in known)]
