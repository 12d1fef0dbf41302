"""Saving and restoring a graph in flight.

A graph cannot be stored, and running the forward again would use newer weights than F did. So what the graph saved
is stored: every saved tensor that is not parameter storage (those are the live weights, whatever they hold by
then). To restore, the forward is run again for the structure, and the stored values are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Raw = Any  # torch._C._autograd.SavedTensor


def nodes(roots: Sequence[Tensor]) -> list[Any]:
    """The nodes of the graph above `roots`, in one fixed order."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [root.grad_fn for root in reversed(roots) if root.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        stack.extend(reversed([parent for parent, _ in node.next_functions if parent is not None]))
    return order


def saved(roots: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Raw]]:
    """(name of the node, saved tensor, its raw handle) for all that the graph keeps for its backward."""
    for node in nodes(roots):
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names:
            raw = getattr(node, name)
            value = getattr(
                node, name.removeprefix("_raw") if hasattr(node, name.removeprefix("_raw")) else "saved_tensors"
            )
            raws = raw if isinstance(raw, (list, tuple)) else [raw]
            values = value if isinstance(value, (list, tuple)) else [value]
            for each, tensor in zip(raws, values, strict=True):
                if isinstance(tensor, Tensor):
                    yield f"{type(node).__name__}.{name.removeprefix('_raw_saved_')}", tensor, each


def storages(tensors: Sequence[Tensor]) -> set[int]:
    """Addresses of the memory under the tensors."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def keep(roots: Sequence[Tensor], known: set[int]) -> tuple[list[Tensor], list[str]]:
    """Copies of what the graph saved outside the memory `known` (weights and inputs), and the names, in order."""
    values, names = [], []
    for name, tensor, _ in saved(roots):
        if tensor.untyped_storage().data_ptr() not in known:
            values.append(tensor.detach().clone())
            names.append(name)
    return values, names


def put_back(
    roots: Sequence[Tensor], known: set[int], values: Sequence[Tensor], names: Sequence[str], where: str
) -> None:
    """Make the backward of this graph, built anew, use `values` instead of what it saved itself."""
    found = [(name, raw) for name, t, raw in saved(roots) if t.untyped_storage().data_ptr() not in known]
    if [name for name, _ in found] != list(names):
        raise ValueError(
            f"{where}: the forward builds another graph than when the state was saved "
            f"({len(found)} saved tensors against {len(names)}); is it the same model, in the same mode?"
        )
    for (_, raw), value in zip(found, values, strict=True):
        raw.register_hooks(_forget, _Give(value))


def _forget(tensor: Tensor) -> None:
    return None


class _Give:
    """Unpack hook: hand out the stored value."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, packed: None) -> Tensor:
        return self.value


def held_bytes(roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    """Bytes of activations a graph keeps alive: saved tensors and inputs, each memory once, weights not counted."""
    known = storages(weights)
    total: dict[int, int] = {}
    for tensor in [*leaves, *(t for _, t, _ in saved(roots))]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            total[storage.data_ptr()] = storage.nbytes()
    return sum(total.values())


def rerun(stage: Any, x: Any, target: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The stage's forward once more, for the structure of its graph: buffers and random state as before."""
    buffers = [(b, b.detach().clone()) for b in stage.module.buffers()]
    with torch.random.fork_rng(devices=[]):
        leaves, given = stage.enter(x)
        output = stage.run(given, target)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.data.copy_(value)  # not seen by graphs that saved the buffer
    return leaves, output
