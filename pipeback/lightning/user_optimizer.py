"""The user's optimizer while stages have their own: its steps, and the clipping that the Trainer asks for.

The user's optimizer steps, too, but on stand-ins without gradients. So no weight changes, whatever its class does with
weights that have none, while hooks, profilers and schedulers see the step that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.private import innermost_step_hooks


class UserOptimizer:
    """The optimizer of `configure_optimizers` during a fit."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._stand_ins: list[list[nn.Parameter]] = []  # those of each group
        self._states: dict[Tensor, Any] = {}  # of those that the optimizer has given one

    @contextmanager
    def stepping(self, before: Callable[[], object]) -> Iterator[None]:
        """Within this context a step of the optimizer runs its closure, then `before`, then itself on the stand-ins."""
        optimizer: Any = self.optimizer
        original, own = optimizer.step, optimizer.__dict__.get("step")

        def step(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            result = None if closure is None else closure()
            before()
            with self._aside():
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

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Within this context the optimizer's class steps the stand-ins. Hooks of the step see the weights."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        weights = [group["params"] for group in groups]
        if [len(ps) for ps in self._stand_ins] != [len(ps) for ps in weights]:
            self._stand_ins = [[_stand_in(p) for p in ps] for ps in weights]

        depth = 0  # a step may call the one of its base class, which has the same hooks

        def put(*_: object) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                state.update(self._states)
                _give(groups, self._stand_ins)

        def take(*_: object) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                _give(groups, weights)
                self._states = {p: state.pop(p) for ps in self._stand_ins for p in ps if p in state}

        with innermost_step_hooks(self.optimizer, put, take):
            try:
                yield
            finally:
                if depth:  # it has failed
                    depth = 1
                    take()


def _give(groups: list[dict[str, Any]], weights: list[Any]) -> None:
    for group, mine in zip(groups, weights, strict=True):
        group["params"] = mine


def _stand_in(p: Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.zeros(1, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
    found.__dict__.update(p.__dict__)  # by which an optimizer may choose what to do with it
    return found


def norm_and_value(clip: float | None, algorithm: Any) -> tuple[float | None, float | None]:
    """The largest norm of a stage's gradient and the largest absolute value of an entry; None: no limit."""
    clip = clip or None
    return (None, clip) if getattr(algorithm, "value", algorithm) == "value" else (clip, None)
