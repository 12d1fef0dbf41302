"""Row state: the state of a method over rows. Lists of tensors are tensors (n, …), plain numbers are vectors (n).

The stages' own lists become rows of these tensors. Their numbers follow at the end of a run of ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import State
from pipeback.stages.stage import Stage


class RowState:
    """The method's state of these stages. lay: makes the lists of a name rows, and returns them as tensors (n, …)."""

    def __init__(self, stages: Sequence[Stage], lay: Callable[[str], list[Tensor]]) -> None:
        self.stages, self.several, self._lay = stages, len(stages) > 1, lay
        self._kind: dict[str, Any] = {"dtype": torch.float64, "device": stages[0].device or "cpu"}  # of numbers
        self._whole: State | None = None
        self._parts: dict[tuple[int, int], State] = {}

    def part(self, rows: tuple[int, int] | None) -> State:
        """Return the state of the rows from one up to another; None: of all."""
        if self._whole is None:
            self._whole = self._taken()
        if rows is None:
            return self._whole
        if rows not in self._parts:
            self._parts[rows] = {
                name: [None if t is None else t[slice(*rows)] for t in value]
                for name, value in self._whole.items() if isinstance(value, list)
            }  # fmt: skip
        numbers = {k: v[slice(*rows)] for k, v in self._whole.items() if not isinstance(v, list)}
        return {**self._parts[rows], **numbers}

    def put(self, rows: tuple[int, int] | None, before: State, after: State) -> None:
        """Take the state after an update of these rows."""
        if after is before:
            return
        assert self._whole is not None
        for name, value in after.items():
            old = self._whole.get(name)
            if isinstance(value, list):
                if not of_velocities(name):
                    for a, b in zip(before[name], value, strict=True):
                        if a is not b:
                            a.copy_(b)
            elif rows is None:
                self._whole[name] = value
            else:
                old = torch.zeros(len(self.stages), **self._kind) if old is None else old.clone()
                old[slice(*rows)] = value
                self._whole[name] = old

    def give(self) -> bool:
        """Hand the numbers back to the stages, which hold the lists already. Returns whether there were any updates."""
        whole, self._whole = self._whole, None
        self._parts.clear()
        if whole is None:
            return False
        for r, stage in enumerate(self.stages):
            numbers: State = {}
            for name, value in whole.items():
                if not isinstance(value, list):
                    now = value[r].item() if isinstance(value, Tensor) else value
                    if name in stage.state or now:
                        kind: Callable[[Any], Any] = type(stage.state.get(name, now))
                        numbers[name] = kind(now)
            stage.put_state({**stage.state, **numbers})
        return True

    def _taken(self) -> State:
        states = [stage.state for stage in self.stages]
        found: State = {}
        for name in dict.fromkeys(name for state in states for name in state):
            value = next(state[name] for state in states if name in state)
            if isinstance(value, list):
                found[name] = value if of_velocities(name) else self._lay(name)
            elif not self.several:
                found[name] = value
            else:
                found[name] = torch.tensor([state.get(name, 0) for state in states], **self._kind)
        return found


def of_velocities(name: str) -> bool:
    """Whether a list of a method's state is that of the velocities; in a chain, a number stands before its name."""
    return name.rpartition("/")[2] == "velocity"
