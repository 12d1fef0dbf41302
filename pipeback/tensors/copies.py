"""Copies of tensors that lie in memory as the original does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeback.private import identity
from pipeback.tensors.layout import LINE, form_of


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of what is one, or a tuple with some in it."""
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor)]


def storages(tensors: Sequence[Tensor]) -> set[int]:
    """The storages under the tensors, which keep their identity while their memory is away."""
    return {identity(t) for t in tensors if t.numel()}


def replica(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy that lies in memory as the original does: strides, and place within 64 bytes."""
    device = device or tensor.device
    if tensor.is_sparse or not tensor.numel():
        return tensor.detach().to(device, copy=True)
    form = form_of(tensor)
    if tensor.data_ptr() % LINE != form.shift * tensor.element_size() or (not form.shift and tensor.is_contiguous()):
        return tensor.detach().to(device, copy=True)
    copy = form.empty(device)
    form.elements(copy).copy_(form.elements(tensor))
    return copy
