"""Trained weights: which weights the user has frozen (`requires_grad_(False)`) since the pipeline was built.

Autograd gives these no gradient from then on, not even those of micro-batches in flight. They make no update either, so
that a method that predicts weights predicts these as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter

from torch import Tensor

from pipeback.methods.base import Shift, Weights
from pipeback.stages.flight import keep_frozen
from pipeback.stages.stage import Stage

_needs = attrgetter("requires_grad")


class Trained:
    """Which of some weights are trained, as it is now."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = list(weights)
        self._were = list(map(_needs, self._weights))

    def changed(self) -> bool:
        """Whether one of them was frozen since, or is trained again."""
        return list(map(_needs, self._weights)) != self._were

    def as_they_were(self) -> AbstractContextManager[None]:
        """A context within which each is frozen or trained as it was."""
        return _needing(self._weights, self._were)


def frozen(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """The weights of these stages that are frozen now: which stage of the sequence, and which of its weights."""
    return [(r, n) for r, stage in enumerate(stages) for n, p in enumerate(stage.params) if not p.requires_grad]


def note_frozen(replicas: Sequence[Sequence[Stage]]) -> None:
    """Let the stages of every replica know which weights are frozen now, in the first, which the others follow."""
    for alike in zip(*replicas, strict=True):
        now = tuple([n for _, n in frozen(alike[:1])])
        for stage in alike:
            if now != stage.learnt.frozen:
                keep_frozen(stage.flights.values(), stage.learnt.frozen)
                stage.learn(frozen=now)


def with_frozen(params: Sequence[Tensor], still: Collection[int]) -> AbstractContextManager[None]:
    """A context in which these weights are frozen, and no others."""
    return _needing(params, [n not in still for n in range(len(params))])


@contextmanager
def _needing(weights: Sequence[Tensor], needs: Sequence[bool]) -> Iterator[None]:
    odd = [p for p, need in zip(weights, needs, strict=True) if p.requires_grad != need]
    for p in odd:
        p.requires_grad_(not p.requires_grad)
    try:
        yield
    finally:
        for p in odd:
            p.requires_grad_(not p.requires_grad)


def unshifted(chosen: Weights | Shift, weights: Weights, still: Collection[int]) -> Weights | Shift:
    """The weights that a method has chosen, but `weights` for those of the numbers `still`, which are frozen."""
    if isinstance(chosen, Shift):
        directions = [None if n in still else x for n, x in enumerate(chosen.directions)]
        return Shift(chosen.weights, chosen.coefficients, directions)
    return [w if n in still else x for n, (w, x) in enumerate(zip(weights, chosen, strict=True))]
