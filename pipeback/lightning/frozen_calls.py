"""Frozen calls: which modules without trained weights a `training_step` calls itself, and which its other calls use.

Stages on other devices, or with a store, have the weights of both, and `training_step` can then use none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeback.lightning.step_calls import StepCalls
from pipeback.splitting.call_listeners import modules_heard


class FrozenCalls:
    """The calls of one run, of modules that have weights, none of which trains."""

    def __init__(self) -> None:
        self._own: dict[str, set[int]] = {}  # called by training_step itself: the identities of their weights
        self._used = set[int]()  # the weights of those that other calls use
        self._deep = 0  # how many calls without gradients of other modules are running

    @property
    def shared(self) -> list[str]:
        """Those that `training_step` calls itself, some of whose weights its calls of other modules use."""
        return [name for name, weights in self._own.items() if weights & self._used]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which a module with trained weights runs without gradients."""
        self._deep += 1
        try:
            yield
        finally:
            self._deep -= 1

    @contextmanager
    def heard(self, module: nn.Module, running: Callable[[], StepCalls | None]) -> Iterator[None]:
        """A context for a run of the `training_step` of this module. running: hears its other calls."""
        paths = {m: f"self.{path}" for path, m in module.named_modules() if path}
        names = {m: path for m, path in paths.items() if (own := [*m.parameters()]) and not any(map(_trains, own))}

        def called(original: Callable[..., Any], m: nn.Module, args: Any, kwargs: Any) -> Any:
            calls = running()
            if calls is not None and m in names:
                weights = {id(p) for p in m.parameters()}
                if calls.apart or self._deep:
                    self._used |= weights
                else:
                    self._own.setdefault(names[m], set()).update(weights)
            return original(m, *args, **kwargs)

        with modules_heard(names, called):
            yield


def _trains(weight: nn.Parameter) -> bool:
    return weight.requires_grad
