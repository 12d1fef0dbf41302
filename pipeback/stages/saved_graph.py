"""Saving and restoring a graph in flight.

A graph cannot be stored, and running the forward again would use newer weights than the original forward did. So we
store the tensors that the graph has saved, except those that are parameter storage (they read the live weights anyway).
To restore, the forward is run again for the structure of the graph, and the stored values are put back. The tensors
that an in-place change of a view hides are found by calling its node (`copy_slices`).
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeback.private import Raw, identity, numbers_of, shown
from pipeback.splitting.module_restore import Untouched
from pipeback.stages import copy_slices
from pipeback.tensors.copies import lies_in, pieces, replica, storages, tensors_in


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
    """Yield (name of the node, saved tensor, its raw handle) for all that the graph keeps for its backward.

    A tensor that a node hides has None instead of a raw handle.
    """
    graph = nodes(roots)
    yield from _shown(graph)
    for node in filter(copy_slices.hides, graph):
        yield from ((f"{type(node).__name__}.saved", tensor, None) for tensor in copy_slices.tensors(node))


def _shown(graph: Sequence[Any]) -> Iterator[tuple[str, Tensor, Raw]]:
    for node in graph:
        yield from ((f"{type(node).__name__}.{name}", tensor, raw) for name, tensor, raw in shown(node))


def keep(roots: Sequence[Tensor], known: set[int], where: str) -> tuple[list[Tensor], list[str]]:
    """Return copies of what the graph saved outside the memory `known` (weights, inputs), and the graph's signature.

    The signature lists every saved tensor and every saved number, in order. Numbers cannot be put back, so a forward
    that yields other numbers (a threshold taken from the data, say) must be noticed.
    """
    values, signature, graph = [], [], nodes(roots)
    try:
        found = list(_shown(graph))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"{where}: a tensor that its backward needs was changed in place after its forward, so that neither it nor "
            "a state can be computed; if the forward writes into a buffer, as self.count.add_(1), compute with "
            "self.count.clone()"
        ) from error
    for name, tensor, _ in found:
        if not lies_in(tensor, known):
            values.append(replica(tensor))
            signature.append(name)
    for node, key, value in _attributes(graph):
        if isinstance(value, Tensor):
            values.append(replica(value))
        elif not _plain(value):
            raise TypeError(
                f"{where}: {type(node).__name__} keeps ctx.{key}, a {type(value).__name__}, which cannot be stored; "
                "keep tensors with ctx.save_for_backward, and numbers"
            )
        signature.append(f"{type(node).__name__}.ctx.{key}={'' if isinstance(value, Tensor) else repr(value)}")
    others, lines = copy_slices.taken(graph, known, where)
    return values + [replica(tensor) for tensor in others], signature + _numbers(graph) + lines


def put_back(
    roots: Sequence[Tensor],
    known: set[int],
    values: Sequence[Tensor],
    signature: Sequence[str],
    where: str,
    device: torch.device | None = None,
    handles: copy_slices.Handles | None = None,
) -> None:
    """Make the backward of this rebuilt graph use `values` instead of the tensors that it has saved itself.

    device: where the graph computes, if the values wait elsewhere and are fetched on demand. handles: those of the
    saved tensors, as `rerun` returns them.
    """
    lines = [line for line in signature if line.startswith(copy_slices.MARK)]
    signature, graph = signature[: len(signature) - len(lines)], nodes(roots)
    with nullcontext() if handles is None else handles.looking(known):
        found = [
            (name, raw if handles is None else handles.of(t) or raw)  # hooks are not told of numbers
            for name, t, raw in _shown(graph)
            if not lies_in(t, known)
        ]
        places = copy_slices.fit(graph, known, lines, handles)
    attributes = list(_attributes(graph))
    count = len(found) + len(attributes)
    kept = [item.partition("=") for item in signature[len(found) : count]]
    names = [name for name, _ in found] + [f"{type(node).__name__}.ctx.{key}" for node, key, _ in attributes]
    wanted = [*signature[: len(found)], *(name for name, _, _ in kept), *signature[count:]]
    if names + _numbers(graph) != wanted or places is None:
        raise ValueError(
            f"{where}: the forward builds a different graph than when the state was saved; is it the same model, in "
            "the same mode, and the same torch? (a graph that depends on the data, or numbers taken from it, cannot be "
            "restored)"
        )
    given = iter(values)
    for _, raw in found:
        give = _Give(next(given), device)
        if isinstance(raw, copy_slices.Handle):
            raw.give = give
            continue
        try:
            raw.register_hooks(_forget, give)
        except RuntimeError as error:
            raise ValueError(
                f"{where}: the graph has hooks of its own, as activation checkpointing sets, and cannot be restored; "
                "drain() before saving"
            ) from error
    for (node, key, _), (_, _, text) in zip(attributes, kept, strict=True):
        setattr(node, key, literal_eval(text) if text else _Give(next(given), device)(None))
    rest = [_Give(value, device) for value in given]
    for handle, number in places:
        handle.give = rest[number]


def _plain(value: Any) -> bool:
    """Whether a value can be written as text: a number, a container of numbers, or a size in a compiled graph."""
    if isinstance(value, dict):
        return all(_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _attributes(graph: Sequence[Any]) -> Iterator[tuple[Any, str, Any]]:
    """The attributes that custom Functions have set on their ctx."""
    for node in graph:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from ((node, key, value) for key, value in sorted(vars(node).items()))


def _numbers(graph: Sequence[Any]) -> list[str]:
    """The numbers that torch's own nodes have saved."""
    return [f"{type(node).__name__}.{found}" for node in graph for found in numbers_of(node)]


def _forget(tensor: Tensor) -> None:
    return None


class _Give:
    """Unpack hook: hand out the stored value."""

    def __init__(self, value: Tensor, device: torch.device | None) -> None:
        self.value, self.device = value, device or value.device

    def __call__(self, packed: None) -> Tensor:
        return self.value if self.value.device == self.device else replica(self.value, self.device)


def held(roots: Sequence[Tensor], leaves: Sequence[Tensor], known: set[int]) -> dict[int, int]:
    """The memory that a graph keeps alive, saved tensors and inputs: bytes by identity of a storage. known: memory that
    is left out, that of the weights for one; it may grow meanwhile.
    """
    total: dict[int, int] = {}
    for piece in (piece for t in [*leaves, *(t for _, t, _ in saved(roots))] for piece in pieces(t)):
        storage = piece.untyped_storage()
        if identity(storage) not in known:
            total[identity(storage)] = storage.nbytes()
    return total


def held_bytes(roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    """The bytes of activations that a graph keeps alive, each memory once."""
    return sum(held(roots, leaves, storages(weights)).values())


def rerun(
    stage: Any, x: Any, target: Any, around: Untouched
) -> tuple[tuple[Tensor, ...], Any, copy_slices.Handles | None]:
    """Run the stage's forward once more, for the structure of its graph; buffers and random state are put back.

    around: `untouched` of the stage; it serves any number of reruns.
    Returns its leaves, its output, and handles of the saved tensors, if the graph hides some of them.
    """
    leaves, output = _once_more(stage, x, target, around)
    if getattr(stage.call, "handles", None) is not None:  # it has hooks on what it saves (`afresh`)
        return leaves, output, stage.call.handles
    roots = [part for part in tensors_in(output) if part.requires_grad]
    if not any(True for node in filter(copy_slices.hides, nodes(roots)) for _ in copy_slices.tensors(node)):
        return leaves, output, None
    handles = copy_slices.Handles(stage.label)
    with saved_tensors_hooks(handles.pack, handles.unpack):
        return *_once_more(stage, x, target, around), handles


def _once_more(stage: Any, x: Any, target: Any, around: Untouched) -> tuple[tuple[Tensor, ...], Any]:
    with around, torch.random.fork_rng(devices=[]):
        leaves, given = stage.enter(x)
        return leaves, stage.run(given, target)
