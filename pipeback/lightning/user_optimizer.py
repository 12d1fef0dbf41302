"""The user's optimizer while stages have their own.

The user's optimizer steps, too, so that hooks, profilers and schedulers see the step that they wait for. Its class then
steps stand-ins that have no gradient, and changes no weight, whatever it does with weights that have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.lightning.stage_optimizers import twin_of


class UserOptimizer:
    """The optimizer of `configure_optimizers` during a fit."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @contextmanager
    def stepping(self, before: Callable[[], object]) -> Iterator[None]:
        """Within this context a step of the optimizer runs its closure, the user's hooks before a step, `before`, and
        itself on the stand-ins.
        """
        optimizer: Any = self.optimizer
        original, own = optimizer.step, optimizer.__dict__.get("step")

        def step(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            result = None if closure is None else closure()
            with self._aside(before):
                original(**more)
            return result

        step.__dict__.update(getattr(original, "__dict__", {}))  # what a scheduler has marked its wrapper with
        optimizer.step = step
        try:
            yield
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

    @cached_property
    def _twin(self) -> Any:
        """An optimizer of the same class over the stand-ins: one for each weight."""
        twin = twin_of(self.optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [
            {"params": [_stand_in(p) for p in group["params"]]} for group in self.optimizer.param_groups
        ]
        return twin

    @contextmanager
    def _aside(self, before: Callable[[], object]) -> Iterator[None]:
        """Within this context a step of the optimizer runs `before`, and is one of its twin. Hooks of the step see the
        weights, and may set options.
        """
        given: list[dict[str, Any]] = []

        def last(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if not given:
                before()
            given[:] = self._lend()
            # the last hook before a step may hand on other arguments, of which the first is the optimizer
            return (self._twin, *args[1:]), named

        handle = self.optimizer.register_step_pre_hook(last)
        try:
            yield
        finally:
            handle.remove()
        if not given:  # somebody has replaced the step by one that makes none now
            before()
        for options, changed, group in zip(given, self._twin.param_groups, self.optimizer.param_groups, strict=False):
            # which may count steps; hooks after the step have set the others
            group.update({k: v for k, v in _options(changed).items() if k not in options or options[k] is not v})

    def _lend(self) -> list[dict[str, Any]]:
        """Give the twin the options of the optimizer, and return them."""
        given = [_options(group) for group in self.optimizer.param_groups]
        for options, group in zip(given, self._twin.param_groups, strict=True):
            group.update(options)
        return given


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _stand_in(p: Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.zeros(1, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
    found.__dict__.update(p.__dict__)  # by which an optimizer may choose what to do with it
    return found
