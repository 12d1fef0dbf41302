"""Replica sync: copies of the model, which further replicas in one process train, follow the user's model.

A user who writes into the model's weights, or freezes one, means all replicas (modes and numbers: `settings.Mirror`).
Over processes each rank has a model of its own, in which the user does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from pipeback.stages.stage import Stage
from pipeback.tensors.copies import equal

_writes = attrgetter("_version", "requires_grad")


class ReplicaSync:
    """everywhere: the stages of every replica in this process; those of the first hold the user's modules."""

    def __init__(self, everywhere: Sequence[Sequence[Stage]]) -> None:
        # weights in a store are elsewhere between two pushes, where nobody writes into them
        there = [[stage for stage in stages if stage.home.slot is None] for stages in everywhere]
        first, *others = [[m for stage in stages for m in stage.module.modules()] for stages in there]
        self._modules: list[tuple[nn.Module, ...]] = list(zip(first, *others, strict=True)) if others else []
        self._weights = [p for modules in self._modules for p in modules[0]._parameters.values() if p is not None]
        self.remember()
        self._begun = False

    @property
    def due(self) -> bool:
        """Whether the user seems to have written something since `remember`."""
        return bool(self._modules) and not (self._begun and list(map(_writes, self._weights)) == self._written)

    def remember(self) -> None:
        """The weights of all replicas are as they should be."""
        self._begun = True
        self._written = list(map(_writes, self._weights))

    def follow(self, join: Callable[[], object], go_on: Callable[[], object]) -> None:
        """Copy to every replica what the user has written, before loops take it over, which puts versions back.

        join: waits until no thread works. go_on: does what takes it over, in any case.
        """
        copied = False
        if self.due:
            join()  # a thread amid an update has other versions for a moment
            copied = self.due
        if copied:
            known = {id(p) for p, before in zip(self._weights, self._written, strict=True) if _writes(p) != before}
            with torch.no_grad():
                for own, *twins in self._modules:
                    for twin in twins:
                        self._copy(own, twin, known)
            self.remember()  # for whom `go_on` calls
        go_on()
        if copied:
            self.remember()

    def _copy(self, own: nn.Module, twin: nn.Module, known: set[int]) -> None:
        weights = [(p, twin._parameters[key]) for key, p in own._parameters.items() if p is not None]
        for p, other in weights:
            _put(p, other)
            assert other is not None
            other.requires_grad_(p.requires_grad)
        # statistics are each replica's own, until somebody writes them, as `load_state_dict` does with the weights
        if not self._begun or any(id(p) in known for p, _ in weights):
            for key, buffer in own._buffers.items():
                _put(buffer, twin._buffers[key])


def _put(value: Tensor | None, into: Tensor | None) -> None:
    if value is not None and into is not None and not equal(value, into):
        into.copy_(value)
