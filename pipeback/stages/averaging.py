"""Averaging: gradient sums of an update, divided by the number of micro-batches in them, and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeback.stages.gradients import GradientSums


def clipped(
    grads: Sequence[Tensor | None],
    norm: float | None,
    value: float | None,
    total: Tensor | None = None,
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Return the gradients clipped by norm and by value, and whether any was clipped, as a 0-d tensor (None: no limit).

    total: the norm of the whole gradient, where other ranks hold the rest of it.
    """
    there = [g for g in grads if g is not None]
    if not there:
        return grads, None
    found = None
    if norm is not None:
        if total is None:  # torch knows the norm of a sparse gradient from 2.13 on
            total = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in there])
        # not clip_grad_norm_, which would change a gradient that was just sent upstream
        scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        grads = [None if g is None else g * scale.to(g.dtype) for g in grads]
        found = scale < 1
    if value is not None:
        pairs = [None if g is None else _bounded(g, value) for g in grads]
        grads = [None if pair is None else pair[0] for pair in pairs]
        over = torch.stack([pair[1] for pair in pairs if pair is not None]).any()
        found = over if found is None else found | over
    return grads, found


def averaged(
    sums: GradientSums,
    norm: float | None,
    value: float | None,
    masters: Sequence[Tensor] | None = None,
    whole: Callable[[Sequence[Tensor | None]], Tensor] | None = None,
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Return the gradient sums, divided once by the true count and clipped.

    masters: the weights, if gradients are to have their type. whole: returns the norm of the whole gradient, where
    other ranks hold the rest of it. Returns also whether the gradient was clipped, as a 0-d tensor; None without a
    limit.
    """
    grads, count, owned, done = sums
    if masters is not None:
        owned = ()
        grads = [None if g is None else g.to(w.dtype) for w, g in zip(masters, grads, strict=True)]
    if count != 1:
        pairs = zip(grads, owned or [False] * len(grads), strict=True)
        grads = [None if g is None else g.div_(count) if mine else g / count for g, mine in pairs]
    if norm is None and value is None:
        return grads, done
    return clipped(grads, norm, value, whole(grads) if whole is not None and norm is not None and grads else None)


def _bounded(gradient: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """The gradient clamped to ±value, and whether any entry was beyond that."""
    if gradient.layout is torch.strided:
        return gradient.clamp(-value, value), (gradient.abs() > value).any()
    whole = gradient.coalesce()
    bounded, over = _bounded(whole.values(), value)
    return torch.sparse_coo_tensor(
        whole.indices(), bounded, whole.shape, is_coalesced=True, check_invariants=False
    ), over
