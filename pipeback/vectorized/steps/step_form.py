"""Step form: the step of weights that some rows of a stack make at a tick, written for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.vectorized.steps.adam_rows import AdamStep, adapted
from pipeback.vectorized.steps.own_step import OwnStep
from pipeback.vectorized.steps.row_tensors import AnyStep, RowTensors
from pipeback.vectorized.steps.summed_step import SummedStep

Slots = Sequence[Tensor] | Tensor


class RingPlaces(NamedTuple):
    """Where tensors wait, as numbers on the device. read: the slot that B reads. write: the lines for what F saves."""

    read: Tensor
    write: Tensor


def shifts_alike(step: AnyStep) -> bool:
    """Whether F and B run on the same weights."""
    some, others = step.ahead, step.back
    return len(some) == len(others) and all(map(torch.equal, some, others))


def slots(rings: Sequence[Tensor], at: Slots) -> Sequence[Tensor]:
    """Return the slots of this number, written for a compiler; `at` may be the slots themselves."""
    at = at.read if isinstance(at, RingPlaces) else at
    return [ring.index_select(0, at)[0] for ring in rings] if isinstance(at, Tensor) else at


def shifted(
    weights: Sequence[Tensor], trained: Sequence[int], velocities: Sequence[Any], by: Sequence[Tensor]
) -> list[Tensor]:
    """Return the weights, with w + c·v for the trainable ones, written for a compiler."""
    found = list(weights)
    for n, v, c in zip(trained, velocities, by, strict=False):
        found[n] = torch.addcmul(found[n], v, c)
    return found


Numbers = tuple[Any, ...]  # of every row −η·a and −η·b, and m as a tensor; of Adam η


def kept(rows: RowTensors, step: AnyStep) -> list[Any]:
    """Return what a compiled step reads and writes beside the weights; before an own step, which follows, gradients."""
    if isinstance(step, OwnStep):
        return rows.gradients()
    if isinstance(step, AdamStep):
        first, second, steps = rows.kept(step)
        return [first, second, rows.counts(steps)]
    return rows.kept(step)


def count(rows: RowTensors, step: AnyStep) -> None:
    """Note in host memory that a compiled step was made, if it counts on the device of the weights."""
    if isinstance(step, AdamStep) and rows.stepped:
        steps = rows.kept(step)[2]
        if steps.device != rows.stepped[0].device:
            steps += 1


def numbers(rows: RowTensors, step: AnyStep) -> Numbers:
    if isinstance(step, OwnStep | SummedStep):
        return ()
    if isinstance(step, AdamStep):
        return step.columns, *step.spikes
    return step.along, step.against, rows.number(step.momentum)


class How(NamedTuple):
    """The form of a step for a compiler.

    step: a function of the weights, the optimizer state, the gradients and `numbers`. by_factors: whether large
    gradients may stay factors.
    """

    step: Callable[..., None]
    by_factors: bool

    @classmethod
    def of(cls, step: AnyStep) -> How:
        if isinstance(step, OwnStep | SummedStep):
            return cls(noted, False)
        if isinstance(step, AdamStep):
            return cls(partial(adapted, step.settings), False)
        return cls(partial(descended, step.decays), not step.late)  # `late` adds gradients to weights, too


def noted(weights: Sequence[Tensor], room: Sequence[Tensor], grads: Sequence[Tensor | None], numbers: Numbers) -> None:
    """Leave the gradients for a step that is not part of the compiled function."""
    for place, g in zip(room, grads, strict=True):
        if g is not None:
            place.copy_(g)


def descended(
    decays: Sequence[float],
    weights: Sequence[Tensor],
    velocities: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    numbers: Numbers,
) -> None:
    """Do v ← m·v + g + λ·w and w ← w − η·(a·v + b·g), written for a compiler; weights without a gradient stay."""
    along, against, momentum = numbers
    for n, (w, g, c, decay) in enumerate(zip(weights, grads, along, decays, strict=True)):
        if g is None:
            continue
        # not add(…, alpha=decay): where g is a product of matrices, inductor makes one call of both and forgets alpha
        moved = late = g + decay * w if decay else g
        if velocities:
            velocities[n].mul_(momentum).add_(moved)
            moved = velocities[n]
        w.addcmul_(moved, c)
        if against:
            w.addcmul_(late, against[n])
