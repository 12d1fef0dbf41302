"""Dtype turns: the user's code and the stages take turns, since the default dtype is one per process.

`precision="bf16-true"` sets the default dtype during `training_step` for the whole process. Stages that run in a thread
of their own need it while they run, and all other code needs the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}


class DtypeTurns:
    """The thread that makes this has its turn from `mine` on, except within `rest`; calls of other threads do nothing.

    Precisions that change no default need no turns.
    """

    def __init__(self, precision: Any) -> None:
        self.dtype = DTYPES.get(str(precision))
        self._lock, self._caller = threading.RLock(), threading.get_ident()
        self._held = False

    def __deepcopy__(self, memo: object) -> DtypeTurns:
        """Copies of a stage, which are made to be timed, take their turns with it."""
        return self

    def mine(self, held: bool = True) -> None:
        if self.dtype is not None and held != self._held and threading.get_ident() == self._caller:
            if held:
                self._lock.acquire()
            else:
                self._lock.release()
            self._held = held

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Within this context the stages may run."""
        held = self._held
        self.mine(False)
        try:
            yield
        finally:
            self.mine(held)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within this context, which is one within `rest`, the stages may not run."""
        self.mine()
        try:
            yield
        finally:
            self.mine(False)

    def guard(self, stage: nn.Module) -> None:
        """Have the stage run in its turn, with the default dtype that it needs."""
        if self.dtype is not None:
            stage.forward = partial(self._run, self.dtype, stage.forward)

    def _run(self, dtype: torch.dtype, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self._lock:
            outside = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return forward(*given, **named)
            finally:
                torch.set_default_dtype(outside)
