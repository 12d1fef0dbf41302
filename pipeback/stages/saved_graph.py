"""Saving and restoring a graph in flight.

A graph cannot be stored, and running the forward again would use newer weights than F did. So what the graph saved
is stored: every saved tensor that is not parameter storage (those are the live weights, whatever they hold by
then). To restore, the forward is run again for the structure, and the stored values are put back. What a change in
place of a view hides is found by calling its node (`hidden`).
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
from pipeback.splitting.as_before import untouched
from pipeback.stages import hidden
from pipeback.tensors.copies import replica, storages, tensors_in


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
    """(name of the node, saved tensor, its raw handle) for all that the graph keeps for its backward.

    What a node hides has no raw handle, but None.
    """
    yield from _shown(roots)
    for node in filter(hidden.hides, nodes(roots)):
        yield from ((f"{type(node).__name__}.saved", tensor, None) for tensor in hidden.tensors(node))


def _shown(roots: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Raw]]:
    for node in nodes(roots):
        yield from ((f"{type(node).__name__}.{name}", tensor, raw) for name, tensor, raw in shown(node))


def keep(roots: Sequence[Tensor], known: set[int], where: str) -> tuple[list[Tensor], list[str]]:
    """Copies of what the graph saved outside the memory `known` (weights and inputs), and a signature of the graph.

    The signature names every saved tensor and every saved number, in order: numbers cannot be put back, so a forward
    that finds others (a threshold taken from the data, say) must be noticed.
    """
    values, signature = [], []
    for name, tensor, _ in _shown(roots):
        if identity(tensor) not in known:
            values.append(replica(tensor))
            signature.append(name)
    for node, key, value in _attributes(roots):
        if isinstance(value, Tensor):
            values.append(replica(value))
        elif not _plain(value):
            raise TypeError(
                f"{where}: {type(node).__name__} keeps ctx.{key}, a {type(value).__name__}, which cannot be stored; "
                "keep tensors with ctx.save_for_backward, and numbers"
            )
        signature.append(f"{type(node).__name__}.ctx.{key}={'' if isinstance(value, Tensor) else repr(value)}")
    others, lines = hidden.taken(nodes(roots), known, where)
    return values + [replica(tensor) for tensor in others], signature + _numbers(roots) + lines


def put_back(
    roots: Sequence[Tensor],
    known: set[int],
    values: Sequence[Tensor],
    signature: Sequence[str],
    where: str,
    device: torch.device | None = None,
    handles: hidden.Handles | None = None,
) -> None:
    """Make the backward of this graph, built anew, use `values` instead of what it saved itself.

    device: where it works, if the values wait elsewhere and come when they are asked for. handles: of what the graph
    saved, as `rerun` gives them.
    """
    lines = [line for line in signature if line.startswith(hidden.MARK)]
    signature = signature[: len(signature) - len(lines)]
    with nullcontext() if handles is None else handles.looking(known):
        found = [
            (name, raw if handles is None else handles.of(t) or raw)  # hooks are not told of numbers
            for name, t, raw in _shown(roots)
            if identity(t) not in known
        ]
        places = hidden.fit(nodes(roots), known, lines, handles)
    attributes = list(_attributes(roots))
    count = len(found) + len(attributes)
    kept = [item.partition("=") for item in signature[len(found) : count]]
    names = [name for name, _ in found] + [f"{type(node).__name__}.ctx.{key}" for node, key, _ in attributes]
    wanted = [*signature[: len(found)], *(name for name, _, _ in kept), *signature[count:]]
    if names + _numbers(roots) != wanted or places is None:
        raise ValueError(
            f"{where}: the forward builds another graph than when the state was saved; is it the same model, in the "
            "same mode, and the same torch? (a graph that depends on the data, or numbers taken from it, cannot be "
            "restored)"
        )
    given = iter(values)
    for _, raw in found:
        give = _Give(next(given), device)
        if isinstance(raw, hidden.Handle):
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
    """Whether it can be written as text: numbers, and what is made of them (of compiled graphs, sizes)."""
    if isinstance(value, dict):
        return all(_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _attributes(roots: Sequence[Tensor]) -> Iterator[tuple[Any, str, Any]]:
    """What custom Functions have put on their ctx."""
    for node in nodes(roots):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from ((node, key, value) for key, value in sorted(vars(node).items()))


def _numbers(roots: Sequence[Tensor]) -> list[str]:
    """The numbers that torch's own nodes have saved."""
    return [f"{type(node).__name__}.{found}" for node in nodes(roots) for found in numbers_of(node)]


def _forget(tensor: Tensor) -> None:
    return None


class _Give:
    """Unpack hook: hand out the stored value."""

    def __init__(self, value: Tensor, device: torch.device | None) -> None:
        self.value, self.device = value, device or value.device

    def __call__(self, packed: None) -> Tensor:
        return self.value if self.value.device == self.device else replica(self.value, self.device)


def held_bytes(roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    """Bytes of activations a graph keeps alive: saved tensors and inputs, each memory once, weights not counted."""
    known = storages(weights)
    total: dict[int, int] = {}
    for tensor in [*leaves, *(t for _, t, _ in saved(roots))]:
        storage = tensor.untyped_storage()
        if identity(storage) not in known:
            total[identity(storage)] = storage.nbytes()
    return sum(total.values())


def rerun(stage: Any, x: Any, target: Any) -> tuple[tuple[Tensor, ...], Any, hidden.Handles | None]:
    """The stage's forward once more, for the structure of its graph: buffers and random state as before.

    Returns its leaves, its output, and handles of what was saved, if the graph hides some of that.
    """
    leaves, output = _once_more(stage, x, target)
    if getattr(stage.call, "handles", None) is not None:  # it has hooks on what it saves (`afresh`)
        return leaves, output, stage.call.handles
    roots = [part for part in tensors_in(output) if part.requires_grad]
    if not any(True for node in filter(hidden.hides, nodes(roots)) for _ in hidden.tensors(node)):
        return leaves, output, None
    handles = hidden.Handles(stage.label)
    with saved_tensors_hooks(handles.pack, handles.unpack):
        return *_once_more(stage, x, target), handles


def _once_more(stage: Any, x: Any, target: Any) -> tuple[tuple[Tensor, ...], Any]:
    with untouched(stage.module), torch.random.fork_rng(devices=[]):
        leaves, given = stage.enter(x)
        return leaves, stage.run(given, target)
