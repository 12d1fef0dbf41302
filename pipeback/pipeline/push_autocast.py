"""Push autocast: the caller's autocast, where stages run as one.

Their operations may run in later calls, and graphs of stages already contain their casts. So the stages enter by
themselves the autocast of the push that brought a micro-batch, and all else runs without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators

P = ParamSpec("P")
R = TypeVar("R")


class PushAutocast:
    """The autocast of the newest push. everywhere: the stages of every replica. order: that of operations."""

    def __init__(self, everywhere: Sequence[Sequence[Stage]], order: str) -> None:
        self._everywhere, self._order = everywhere, order
        self._as_one = False
        self._casts: accelerators.Autocast = ()

    def take(self, as_one: bool, wait: Callable[[], object]) -> None:
        """Let stages enter the autocast that this thread is inside. as_one: whether stages may run as one.

        wait: does what was pushed under another one. Raises ValueError where the stages could not enter it.
        """
        if self._order == "skewed" and accelerators.autocast():
            raise ValueError(
                'debug: with order="skewed" a push leaves work to later calls, which its autocast does not reach; '
                "enter it inside the modules, or use another order"
            )
        self._as_one, casts = as_one, accelerators.casting() if as_one else ()
        if casts == self._casts:
            return
        wait()
        self._casts = casts
        for stages in self._everywhere:
            for stage in stages:
                stage.learn(casts=casts)

    def around(self, part: Callable[P, R]) -> Callable[P, R]:
        """Return what does a part of the work under the autocast that this thread is inside."""
        casts = accelerators.casting()
        if not casts:
            return part

        @wraps(part)
        def entered(*given: P.args, **named: P.kwargs) -> R:
            with accelerators.under(casts):
                return part(*given, **named)

        return entered

    def off(self) -> AbstractContextManager[None]:
        """A context without autocast, if the stages enter it by themselves."""
        return accelerators.under(()) if self._as_one else nullcontext()
