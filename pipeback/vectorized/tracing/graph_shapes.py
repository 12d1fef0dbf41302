"""Graph shapes: merges operations of a graph that only change the shape of a tensor and not the order of its numbers.

Batching layers by `torch.func.vmap` leaves many of them, and each costs as much as the arithmetic of a small layer.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
RESHAPES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None if it is not known to be one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose numbers this one has, in the same order; the node itself if it computes anything."""
    while (source := _reshaped(node)) is not None:
        node = source
    return node


def _reshaped(node: fx.Node) -> fx.Node | None:
    """Return the node that this one only gives another shape; None if it does more."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    before, after = shape_of(source), shape_of(node)
    if before is None or after is None or prod(before) != prod(after):
        return None
    if node.target in RESHAPES or (node.target is aten.expand.default and before == after):
        return source
    order = _order(node, len(before))
    moved = None if order is None else [dim for dim in order if before[dim] != 1]
    return source if moved is not None and moved == sorted(moved) else None


def _order(node: fx.Node, dims: int) -> list[int] | None:
    """Return the order into which a node puts the dimensions of its tensor; None if it does something else."""
    if node.target is aten.permute.default:
        given: Any = node.args[1]
        return [int(dim) % dims for dim in given]
    order = list(range(dims))
    if node.target is aten.transpose.int:
        one, other = (int(dim) % dims for dim in node.args[1:3])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
        return order
    if node.target is aten.t.default:
        return order[::-1]
    return None


def merged(graph: fx.Graph) -> None:
    """Write every chain of operations that only change the shape as one, or as none."""
    for node in list(graph.nodes):
        if node.op != "call_function" or _reshaped(node) is None:
            continue
        root, shape = root_of(node), shape_of(node)
        if shape == shape_of(root):
            node.replace_all_uses_with(root)
        elif node.args[0] is not root or node.target not in (aten.view.default, aten.reshape.default):
            node.target, node.args, node.kwargs = aten.reshape.default, (root, list(shape or ())), {}
