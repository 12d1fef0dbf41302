"""Optimizer state watch: reads tensors taken from an optimizer's state again when somebody has replaced them.

A method that predicts from a velocity refers to torch's own momentum buffers, and a step over several stages caches
them. `optimizer.state.clear()`, `optimizer.load_state_dict(...)` and `state[w]["momentum_buffer"] = ...` replace or
remove these buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Method
from pipeback.stages.stage import Stage

BUFFER = "momentum_buffer"


class OptimizerStateWatch:
    """Watches the state of the optimizers of these stages.

    A list named "velocity" in a method's state that begins with None holds torch's buffers (`momentum.velocity`).
    """

    def __init__(self, stages: Iterable[Stage], method: Method) -> None:
        self._stages = [stage for stage in stages if stage.weights]
        self._known: list[list[Any]] = [[] for _ in self._stages]
        self._stays = False  # whether updates have created all entries of the states
        self._glance = Glance(())
        begin = method.init([torch.empty(0)])
        # the names in a chain of methods have numbers
        self._names = [name for name, v in begin.items() if name.rpartition("/")[2] == "velocity" and v == [None]]

    def look(self) -> None:
        """Before operations: react if the state differs from what `remember` has seen; cheap if it does not."""
        if self._stays and self._glance.same():
            return
        for stage, known in zip(self._stages, self._known, strict=True):
            if not _same(_kept(stage), known):
                self._take_anew(stage, known)
                self._stays = False

    def remember(self) -> None:
        """After operations, with no update under way: remember the state, which these operations have written."""
        if not self._stays:
            now = [_kept(stage) for stage in self._stages]
            self._stays = all(map(_same, now, self._known)) and all(map(_stepped, self._stages))
            self._known = now
            if self._stays:
                self._glance = Glance(self._stages)

    def written(self) -> None:
        """React to what was written into any tensor or entry of the states: steps over several stages read all anew."""
        for stage, known in zip(self._stages, self._known, strict=True):
            self._take_anew(stage, known)
        self._stays = False

    def _take_anew(self, stage: Stage, known: list[Any]) -> None:
        state, first = stage.optimizer.state, stage.weights[0]
        entry = state.get(first, {})
        if any(entry is e for e in known) and (BUFFER not in entry or any(entry[BUFFER] is v for v in known)):
            # a step over several stages compares the dictionary of the state, stages as one tensors of the first weight
            stage.optimizer.state = copy.copy(state)  # the entries stay, to which others may refer
            if stage.home.slot is None:  # the state of a store may be out of memory
                entry.update({k: v.clone() for k, v in entry.items() if isinstance(v, Tensor)})
        velocities = [state[w].get(BUFFER) if w in state else None for w in stage.weights]
        for name in self._names:
            if not all(map(is_, velocities, stage.state[name])):
                stage.put_state({**stage.state, name: velocities})


class Glance:
    """A record of the optimizer states of these stages, which is compared with them in one pass."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._counts = [len(state) for state in map(_state, stages)]
        self._values = [value for state in map(_state, stages) for value in state.values()]
        self._entries = [value for value in self._values if isinstance(value, dict)]
        self._velocities = [entry.get(BUFFER) for entry in self._entries]

    def same(self) -> bool:
        """Whether no entry was added, removed or replaced."""
        states = list(map(_state, self._stages))  # read each time, since `load_state_dict` replaces the dictionary
        return (
            list(map(len, states)) == self._counts
            and all(map(is_, chain.from_iterable(map(dict.values, states)), self._values))
            and all(map(is_, map(dict.get, self._entries, repeat(BUFFER)), self._velocities))
        )


_state = attrgetter("optimizer.state")


def _stepped(stage: Stage) -> bool:
    """Whether there has been an update: its version, or in a run of ticks, which tells it later, its entries say so."""
    return bool(stage.version) or len(stage.optimizer.state) == len(stage.weights)


def _kept(stage: Stage) -> list[Any]:
    """Return the optimizer's entries, by identity, and the velocities in them."""
    entries = [entry for entry in stage.optimizer.state.values() if isinstance(entry, dict)]
    return [*entries, *[entry.get(BUFFER) for entry in entries]]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
