"""Reread: what was taken from an optimizer's state is taken anew when somebody has put something else there.

A method that predicts from a velocity has torch's own momentum buffers in its state, and a step over several stages
remembers them. `optimizer.state.clear()`, `optimizer.load_state_dict(...)` and `state[w]["momentum_buffer"] = ...` put
others there, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.stages.stage import Stage

BUFFER = "momentum_buffer"


class Reread:
    """Of the optimizers of these stages.

    A list named "velocity" in a method's state that begins with None is torch's buffers (`momentum.velocity`).
    """

    def __init__(self, stages: Iterable[Stage], method: Method) -> None:
        self._stages = [stage for stage in stages if stage.weights]
        self._known: list[list[Any]] = [[] for _ in self._stages]
        self._stays = False  # updates have put into the states what they put there
        begin = method.init([torch.empty(0)])
        # those of a chain are numbered
        self._names = [name for name, v in begin.items() if name.rpartition("/")[2] == "velocity" and v == [None]]

    def look(self) -> None:
        """Before operations: is there something else than `remember` has seen? Cheap where there is not."""
        for stage, known in zip(self._stages, self._known, strict=True):
            if not _same(_kept(stage), known):
                self._take_anew(stage, known)
                self._stays = False

    def remember(self) -> None:
        """After operations, with no update under way: what is there now has been put there by these."""
        if not self._stays:
            now = [_kept(stage) for stage in self._stages]
            self._stays = all(map(_same, now, self._known)) and all(stage.version for stage in self._stages)
            self._known = now

    def _take_anew(self, stage: Stage, known: list[Any]) -> None:
        state, first = stage.optimizer.state, stage.weights[0]
        entry = state.get(first, {})
        if any(entry is e for e in known) and (BUFFER not in entry or any(entry[BUFFER] is v for v in known)):
            # a step that remembers the tensors of all weights notices it by the tensors of the first weight
            copied = stage.slot is None  # what a store keeps need not be in memory
            state[first] = {k: v.clone() if copied and isinstance(v, Tensor) else v for k, v in entry.items()}
        velocities = [state[w].get(BUFFER) if w in state else None for w in stage.weights]
        for name in self._names:
            if not all(map(is_, velocities, stage.state[name])):
                stage.state = {**stage.state, name: velocities}


def _kept(stage: Stage) -> list[Any]:
    """The optimizer's entries, by identity, and the velocities in them."""
    entries = [entry for entry in stage.optimizer.state.values() if isinstance(entry, dict)]
    return [*entries, *[entry.get(BUFFER) for entry in entries]]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
