"""Replica sync: copies of the model, which further replicas in one process train, follow the user's model.

A user who writes into the model's weights, freezes one, or puts a hook on it, means all replicas (modes and numbers:
`settings.Mirror`), and so does one who writes into a buffer that no forward changes, clears an optimizer's state or
writes into it. Over processes each rank has a model and optimizers of its own, to which the user does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.pipeline.weight_hooks import WeightHooks
from pipeback.stages.stage import Stage
from pipeback.tensors.copies import equal

_writes = attrgetter("_version", "requires_grad")
Buffers = dict[str, Tensor | None]


class ReplicaSync:
    """everywhere: the stages of every replica in this process; those of the first hold the user's modules."""

    def __init__(self, everywhere: Sequence[Sequence[Stage]]) -> None:
        # weights in a store are elsewhere between two pushes, but for those that host memory shows; buffers are not
        self._same = list(zip(*everywhere, strict=True))
        there = [[stage for stage in stages if stage.home.slot is None] for stages in everywhere]
        first, *others = [_modules(stages) for stages in there]
        self._modules: list[tuple[nn.Module, ...]] = list(zip(first, *others, strict=True)) if others else []
        self._weights = [p for modules in self._modules for p in modules[0]._parameters.values() if p is not None]
        if len(everywhere) > 1:
            shown = (stage for stage in everywhere[0] if stage.home.slot is not None and stage.home.slot.shows)
            self._weights += [p for stage in shown for p in stage.module.parameters()]
        every = list(zip(*map(_modules, everywhere), strict=True))
        self._buffers = [
            (own._buffers, twin._buffers, key) for own, *twins in every for twin in twins for key in own._buffers
        ]
        self._stood: list[_Stands] = []  # these buffers when they were remembered
        self._hooks = WeightHooks(every)
        self._states = _OptimizerStates(there if others else [])
        self.remember()
        self._begun = False

    @property
    def due(self) -> bool:
        """Whether the user seems to have written something since `remember`."""
        if self._hooks.due:
            return True
        if not (self._weights or self._buffers):
            return False
        if not self._begun or list(map(_writes, self._weights)) != self._written or self._states.due:
            return True
        return self._stand() != self._stood

    def work(self) -> None:
        """Operations will change what optimizers hold."""
        self._states.work()
        now = self._stand()
        if now != self._stood:  # a rehearsal has changed buffers, as forwards do: each replica has its own
            homes = zip(self._buffers, now, self._stood, strict=True)
            self._buffers = [home for home, stands, stood in homes if stands == stood]
            self._stood = self._stand()

    def remember(self) -> None:
        """The weights and optimizer states of all replicas are as they should be, and nothing is under way."""
        self._begun = True
        for p, other in self._twins():  # a state, which all have been given, does not say what is frozen
            other.requires_grad_(p.requires_grad)
        self._states.rest()
        self._written = list(map(_writes, self._weights))
        self._stood = self._stand()

    def _stand(self) -> list[_Stands]:
        return [_Stands(own.get(key)) for own, _, key in self._buffers]

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
                for module, *twins in self._modules:
                    for other in twins:
                        self._copy(module, other, known)
                copy_shown(stages for stages in self._same if all(map(_rests, stages)))
                for (own, twin, key), stood in zip(self._buffers, self._stood, strict=True):
                    if not self._begun or _Stands(own.get(key)) != stood:
                        _put_buffer(own, twin, key)
                self._states.copy()
            self._hooks.copy()
            self.remember()  # for whom `go_on` calls
        self.work()
        go_on()
        self._states.rest()
        if copied:
            self.remember()

    def _twins(self) -> Iterator[tuple[Tensor, Tensor]]:
        for own, *twins in self._modules:
            for twin in twins:
                pairs = ((p, twin._parameters[key]) for key, p in own._parameters.items())
                yield from ((p, other) for p, other in pairs if p is not None and other is not None)

    def _copy(self, own: nn.Module, twin: nn.Module, known: set[int]) -> None:
        weights = [(p, twin._parameters[key]) for key, p in own._parameters.items() if p is not None]
        for p, other in weights:
            _put(p, other)
        # statistics are each replica's own, until somebody writes them, as `load_state_dict` does with the weights
        if not self._begun or any(id(p) in known for p, _ in weights):
            for key in own._buffers:
                _put_buffer(own._buffers, twin._buffers, key)


class _Stands:
    """A buffer as it stands: which tensor it is, and how often that was written."""

    def __init__(self, buffer: Tensor | None) -> None:
        self._buffer, self._writes = buffer, None if buffer is None else buffer._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stands) and self._buffer is other._buffer and self._writes == other._writes


def _modules(stages: Sequence[Stage]) -> list[nn.Module]:
    return [module for stage in stages for module in stage.module.modules()]


def _put(value: Tensor | None, into: Tensor | None) -> None:
    if value is not None and into is not None and not equal(value, into):
        into.copy_(value)


def _put_buffer(own: Buffers, twin: Buffers, key: str) -> None:
    value, into = own.get(key), twin.get(key)
    if value is None or into is None or (value.shape, value.dtype) != (into.shape, into.dtype):
        twin[key] = None if value is None else value.detach().clone()
    else:
        _put(value, into)


class _OptimizerStates:
    """The states of the optimizers of the first replica's stages, which those of the others follow."""

    def __init__(self, everywhere: Sequence[Sequence[Stage]]) -> None:
        own, *others = everywhere or [[]]
        self._pairs = [(mine, twin) for twins in others for mine, twin in zip(own, twins, strict=True)]
        self._own = own if others else []
        self._found: list[Any] | None = None  # what was there when they came to rest; None: they are at work

    @property
    def due(self) -> bool:
        """While they are at work, clearing a state shows in how many weights have one, and writing into it does not."""
        if self._found is None:
            return any(len(mine.optimizer.state) != len(twin.optimizer.state) for mine, twin in self._pairs)
        return not _same(self._found, self._now())

    def rest(self) -> None:
        self._found = self._now()

    def work(self) -> None:
        self._found = None

    def copy(self) -> None:
        """Copy the states to the other replicas, if somebody has written into them."""
        for mine, twin in self._pairs if self.due else ():
            _copy_state(mine, twin)

    def _now(self) -> list[Any]:
        """Every value of every state, each tensor with how often it was written."""
        entries = [stage.optimizer.state.get(w, {}) for stage in self._own for w in stage.weights]
        values = [value for entry in entries for value in (len(entry), *entry.values())]
        return [(value, value._version) if isinstance(value, Tensor) else (value, None) for value in values]


def copy_shown(same: Iterable[Sequence[Stage]]) -> None:
    """Copy to every replica what the user has written into stages of the first that live in a store, while the weights
    of all of them are shown. same: each of the stages, in all replicas.
    """
    with torch.no_grad():
        for own, *twins in same:
            for twin in twins if own.home.slot is not None else ():
                for p, other in zip(own.module.parameters(), twin.module.parameters(), strict=True):
                    _put(p, other)
                _copy_state(own, twin)


def _rests(stage: Stage) -> bool:
    """Whether the weights of a stage in a store are shown between pushes, and not on the device."""
    slot = stage.home.slot
    return slot is not None and slot.shows and not slot.flat.here


def _copy_state(first: Stage, each: Stage) -> None:
    """Give the optimizer of another replica's stage the state of the first's."""
    there = each.optimizer.state
    for w, other in zip(first.weights, each.weights, strict=True):
        entry = first.optimizer.state.get(w)
        if not entry:
            there.pop(other, None)
        else:
            there[other] = _like(entry, there.get(other) or {})


def _like(entry: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A copy of a weight's state; tensors of the same form keep their memory, to which methods may refer."""
    kept = before if list(before) == list(entry) else {}
    for key, value in entry.items():
        place = kept.get(key)
        if isinstance(value, Tensor):
            if isinstance(place, Tensor) and (place.shape, place.dtype) == (value.shape, value.dtype):
                place.copy_(value)
            else:
                kept[key] = value.clone()
        else:
            kept[key] = value
    return kept


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether they are the same objects, written equally often; numbers may be equal only."""
    return len(some) == len(others) and all(
        writes == again and (a is b or (writes is None and a == b))
        for (a, writes), (b, again) in zip(some, others, strict=True)
    )
