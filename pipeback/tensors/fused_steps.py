"""Fused steps: prepares groups for torch's fused steps (`fused=True`), which make two assumptions.

* Fused momentum SGD assumes that either all of its weights have a momentum buffer, or none; but stages that step
  together may have made their first updates at different times.
* Fused kernels go through memory in order, whatever the strides are; so gradients and state must have the strides of
  the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from pipeback.tensors.weight_list import GRADIENTS, WeightList

Group = dict[str, Any]


@contextmanager
def fitting(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context within which the fused groups of an optimizer are as torch expects; other groups are not touched."""
    groups = optimizer.param_groups
    parts = [_parts(optimizer.state, group) if group.get("fused") else [] for group in groups]
    split = [
        [{**group, "params": part} for part in some] if len(some) > 1 else [group]
        for group, some in zip(groups, parts, strict=True)
    ]
    optimizer.param_groups = [part for some in split for part in some]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, (first, *_) in zip(groups, split, strict=True):
            group.update(first, params=group["params"])  # a subclass may keep counts in it


def fused_sgd_step(state: Any, weights: Sequence[Tensor], group: Group) -> None:
    """Do the fused step of SGD for some weights of a group, all of which have gradients."""
    for part in _parts(state, {**group, "params": weights}):
        entries = [state[w] for w in part] if group["momentum"] else []
        buffers: list[Tensor | None] = [entry.get("momentum_buffer") for entry in entries]
        grads: list[Any] = [w.grad for w in part]
        options = {
            name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        }
        sgd(part, grads, buffers, has_sparse_grad=any(g.is_sparse for g in grads), foreach=False, fused=True, **options)
        for entry, buffer in zip(entries, buffers, strict=True):
            entry["momentum_buffer"] = buffer


def _parts(state: Any, group: Group) -> list[list[Tensor]]:
    """Return the weights of a fused group that have gradients: those with a momentum buffer, and those without."""
    weights = [w for w in group["params"] if w.grad is not None]
    for w in weights:
        w.grad = _laid(w.grad, w)
    if not group.get("momentum"):
        return [weights]
    begun = [state.get(w, {}).get("momentum_buffer") is not None for w in weights]
    halves = ([w for w, known in zip(weights, begun, strict=True) if known == old] for old in (True, False))
    return [half for half in halves if half]


def laid_grads(weights: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Return the gradients of weights, with their strides; None if one is missing or sparse."""
    grads: list[Any] = [w.grad for w in weights]
    beside = weights.room(GRADIENTS) if isinstance(weights, WeightList) and weights.strip is not None else ()
    if len(beside) == len(grads) and all(map(is_, grads, beside)):
        return beside  # laid as the weights are
    if any(g is None or g.layout is not torch.strided for g in grads):
        return None
    return [_laid(g, w) for g, w in zip(grads, weights, strict=True)]


def lay_state(state: Any, groups: Sequence[Group]) -> None:
    """Give the optimizer state of fused groups the strides of their weights."""
    for group in groups:
        for w in group["params"] if group.get("fused") else ():
            entry = state.get(w, {})
            for key, value in entry.items():
                entry[key] = _laid(value, w)


def _laid(value: Any, w: Tensor) -> Any:
    """Return the same values with the strides of a weight."""
    like = isinstance(value, Tensor) and value.layout is torch.strided and value.shape == w.shape
    return torch.empty_like(w, dtype=value.dtype).copy_(value) if like and value.stride() != w.stride() else value
