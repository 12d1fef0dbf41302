"""Gradients: as they enter an optimizer's state, and changed by a method before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeback.methods.base import Weights


def decoupled(group: dict[str, Any]) -> bool:
    """Whether a parameter group decays its weights apart from their gradients, as AdamW does."""
    return bool(group.get("decoupled_weight_decay"))


def entering(w: Tensor, group: dict[str, Any]) -> Tensor:
    """±g + λ·w: the gradient with its sign, and with a weight decay that is not decoupled; dense."""
    g = w.grad
    assert g is not None
    g = g if g.layout is torch.strided else g.to_dense()
    g = -g if group["maximize"] else g
    return g.add(w, alpha=group["weight_decay"]) if group["weight_decay"] and not decoupled(group) else g


def gradients(weights: Weights) -> tuple[list[int], list[Tensor]]:
    """The numbers of the weights that have a gradient, and their gradients, dense."""
    there = [(n, w.grad) for n, w in enumerate(weights) if w.grad is not None]
    return [n for n, _ in there], [g if g.layout is torch.strided else g.to_dense() for _, g in there]


@contextmanager
def replaced(weights: Weights, numbers: Sequence[int], grads: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the weights of these numbers have these gradients.

    The given ones are not changed: they may be what was sent upstream.
    """
    before = [(weights[n], weights[n].grad) for n in numbers]
    for n, g in zip(numbers, grads, strict=True):
        weights[n].grad = g
    try:
        yield
    finally:
        for w, old in before:
            w.grad = old
