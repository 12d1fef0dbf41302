"""Contiguous: the weights of stages, their gradients and their optimizer state each lie in one run of memory, so that a
step over many small tensors is a few operations on one long vector.

Elementwise operations round an element the same way wherever it lies, so no bit changes (a test holds this law).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors.flat_buffer import dense
from pipeback.tensors.weight_list import SCRATCH, WEIGHTS, Arena, Weights, copy, joined

SMALL = 1 << 16  # up to so many bytes per weight, on average, a call costs more than its arithmetic


@torch.no_grad()
def lay_contiguously(stages: Sequence[Stage]) -> None:
    """Lay the weights of these stages, and their scratch, in one strip of memory, if that pays."""
    some = [stage for stage in stages if stage.weights and not stage.masters.wanted and stage.home.slot is None]
    weights: Weights = [w for stage in some for w in stage.weights]
    if len(weights) < 2 or not _pays(weights) or joined(stage.weights for stage in some).strip is not None:
        return
    strip, at = Arena([w.detach() for w in weights]), 0
    for stage in some:
        n = len(stage.weights)
        for p, place in zip(stage.params, strip.room(WEIGHTS, at, n), strict=True):
            place.copy_(p)
            p.data = place
        stage.moved()
        stage.weights.lie(strip, WEIGHTS, at)
        laid = {name: some for name, some in stage.state.items() if _beside(some, stage.weights)}
        for name, some in laid.items():
            copy(room := strip.room(f"state {name}", at, n), some)
            laid[name] = room
        stage.put_state({**stage.state, **laid})
        if stage.versions.scratch is not None:
            stage.versions.lay(strip.room(SCRATCH, at, n))
        at += n
    strip.likes = [w.detach() for w in strip.room(WEIGHTS, 0, at)]  # so that the old ones can be freed


def _beside(some: Any, weights: Weights) -> bool:
    """Whether a part of a method's state is a tensor per weight that is like the weight."""
    there = isinstance(some, list) and len(some) == len(weights) and all(isinstance(t, Tensor) for t in some)
    return there and all(t.shape == w.shape and t.dtype == w.dtype for t, w in zip(some, weights, strict=True))


def _pays(weights: Sequence[Tensor]) -> bool:
    kinds = {(w.dtype, w.device.type) for w in weights}
    plain = kinds in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})  # elsewhere foreach is one call, too
    small = sum(w.nbytes for w in weights) <= SMALL * len(weights)
    return plain and small and all(w.stride() == dense(w) and not w.is_shared() for w in weights)
