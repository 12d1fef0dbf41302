"""Copies: copies of tensors with the layout in memory of the originals."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeback.private import hooks_on, identity
from pipeback.tensors.layout import LINE, form_of


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value that is a tensor or a tuple."""
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor)]


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of a tensor: itself, or the indices and values of a sparse one."""
    kind = tensor.layout
    if kind is torch.strided:
        return (tensor,)
    if kind is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if kind in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if kind in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def made_of(layout: torch.layout, shape: Sequence[int], coalesced: bool, parts: Sequence[Tensor]) -> Tensor:
    """Return the sparse tensor that has these `pieces`."""
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, tuple(shape), is_coalesced=coalesced)
    ends, indices, values = parts
    return torch.sparse_compressed_tensor(ends, indices, values, tuple(shape), layout=layout)


def deep(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module.

    torch itself copies neither compressed sparse buffers, such as adjacencies, nor tensors in attributes that have a
    graph, as the weights that the old `torch.nn.utils.weight_norm` computes before every forward.
    """
    odd = [b for b in module.buffers() if b.layout is not torch.strided]
    odd += [t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor) and t.grad_fn is not None]
    return copy.deepcopy(module, {id(t): t.detach().clone() for t in odd})


def copy_weight_hooks(weight: Tensor, other: Tensor, known: Mapping[int, Any]) -> list[RemovableHandle]:
    """Register the hooks of a weight on its copy, in their order.

    known: copies of modules, by the identity of these: a hook that is a method of one becomes that of its copy.
    """
    found: list[RemovableHandle] = []
    ways: list[Any] = [other.register_hook, other.register_post_accumulate_grad_hook]
    for hooks, register in zip(hooks_on(weight), ways, strict=True):
        for hook in hooks:
            own = known.get(id(getattr(hook, "__self__", None)))
            found.append(register(hook if own is None else MethodType(hook.__func__, own)))
    return found


def lies_in(tensor: Tensor, known: Container[int]) -> bool:
    """Whether a tensor, with all its pieces, lies in these storages."""
    return all(identity(piece) in known for piece in pieces(tensor))


def lies_among(tensor: Tensor, known: Container[int]) -> bool:
    """Whether a tensor, or a piece of it, lies in one of these storages."""
    return any(identity(piece) in known for piece in pieces(tensor))


def equal(a: Tensor, b: Tensor) -> bool:
    """Return what torch.equal does; of sparse tensors, compare the stored indices and values."""
    if a.layout is torch.strided:
        return b.layout is torch.strided and torch.equal(a, b)
    alike = a.layout == b.layout and a.shape == b.shape
    return alike and all(torch.equal(x, y) for x, y in zip(pieces(a), pieces(b), strict=True))


def storages(tensors: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors' storages, which stay the same while the memory is freed."""
    return {identity(piece) for t in tensors if t.numel() for piece in pieces(t)}


def to_device(device: torch.device | None, value: Any) -> Any:
    """Move an input or a target to a stage's device, from whichever device it lies on."""
    if device is None:
        return value
    if isinstance(value, tuple):
        return tuple(to_device(device, part) for part in value)
    return value.to(device) if isinstance(value, Tensor) and value.device != device else value


def replica(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a copy with the strides of the original and its offset within 64 bytes."""
    device = device or tensor.device
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.detach().to(device, copy=True)
    if not tensor.data_ptr() % LINE and tensor.is_contiguous():  # as torch allocates them
        return tensor.detach().to(device, copy=True)
    form = form_of(tensor)
    if tensor.data_ptr() % LINE != form.shift * tensor.element_size():
        return tensor.detach().to(device, copy=True)
    made = form.empty(device)
    form.elements(made).copy_(form.elements(tensor))
    return made
