"""Simplified graph: rewrites a traced graph for speed: with products as a library computes them best, and without
operations that do nothing.

Every function returns a new graph and does not change its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipeback.vectorized.tracing.graph_shapes import merged, shape_of
from pipeback.vectorized.tracing.graphs import ADDED

aten = torch.ops.aten


def simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without operations that change nothing, and with biases added by the matrix products.

    One operation costs as much as the arithmetic of a small layer. Gradients are as contiguous as their weights.
    """
    part: Any = without_idle(graph).graph
    merged(part)
    part.eliminate_dead_code()
    for node in list(part.nodes):
        if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs:
            continue
        for product, bias in (node.args, node.args[::-1]):
            if _joins(node, product, bias):
                with part.inserting_before(node):
                    one = part.call_function(aten.baddbmm.default, (bias, *product.args))
                one.meta = node.meta
                node.replace_all_uses_with(one)
                part.erase_node(node)
                part.erase_node(product)
                break
    for node in list(part.nodes):
        if node.op == "call_function" and _turned(node):
            first, second = (_transposed(part, node, matrix) for matrix in node.args[0].args[::-1])
            with part.inserting_before(node):
                one = part.call_function(node.args[0].target, (first, second))
            one.meta = node.meta
            node.replace_all_uses_with(one)
    part.eliminate_dead_code()
    for node in part.nodes:
        if _outer(node):  # broadcasting is faster, and a compiler fuses it with its users
            node.target = aten.mul.Tensor
        elif node.op == "call_function" and node.target is aten.view.default:
            node.target = aten.reshape.default  # here, and not only in `direct`, for the sake of the compiler
    graph.recompile()
    return graph


def without_idle(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without operations that change nothing; its numbers are the same to the bit."""
    part: Any = graph.graph
    for node in list(part.nodes):
        same = _undone(node) if node.op == "call_function" else None
        if same is not None:
            node.replace_all_uses_with(same)
            part.erase_node(node)
    part.eliminate_dead_code()
    graph.recompile()
    return graph


def constant(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with constant tensors, such as the ones with which a backward begins, created only once."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is aten.ones_like.default and shape_of(node) == ():
            graph.register_buffer("one", torch.ones((), dtype=node.meta["val"].dtype, device=node.meta["val"].device))
            with graph.graph.inserting_before(node):
                one = graph.graph.get_attr("one")
            one.meta = node.meta
            node.replace_all_uses_with(one)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _turned(node: Any) -> bool:
    """Whether a node is (a b)ᵀ, which written as bᵀ aᵀ has the strides of the weight whose gradient it is."""
    product = node.args[0] if _transposes(node) else None
    return isinstance(product, fx.Node) and product.target in ADDED and len(product.users) == 1


def _transposes(node: Any) -> bool:
    """Whether a node exchanges rows and columns of a matrix, or of each of n matrices."""
    return node.target is aten.t.default or (node.target is aten.transpose.int and tuple(node.args[1:]) == (1, 2))


def _outer(node: Any) -> bool:
    """Whether a node is a product of columns with rows."""
    inner = shape_of(node.args[0]) if node.op == "call_function" and node.target in ADDED else None
    return inner is not None and inner[-1] == 1


def _transposed(part: Any, before: Any, matrix: Any) -> Any:
    if _transposes(matrix):
        return matrix.args[0]
    with part.inserting_before(before):
        flat = before.target is aten.t.default
        turned = part.call_function(before.target, (matrix,) if flat else (matrix, 1, 2))
    turned.meta = {"val": matrix.meta["val"].mT}  # its shape tells later whether a product is one of columns with rows
    return turned


def _undone(node: Any) -> fx.Node | None:
    """Return the node whose value this one returns unchanged, alone or together with the one before; else None."""
    given = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if given is None:
        return None
    if node.target in (aten.detach.default, aten.alias.default):
        return given
    if node.target in (aten.t.default, aten.transpose.int):
        twice = given.target is node.target and given.args[1:] == node.args[1:]
        return given.args[0] if twice else None  # type: ignore[return-value]
    if shape_of(node) is None or shape_of(node) != shape_of(given):
        return None
    if node.target in (aten.slice.Tensor, aten.slice_backward.default):
        return given  # of all
    if node.target is aten.mul.Scalar:
        return given if node.args[1] == 1 and node.meta["val"].dtype == given.meta["val"].dtype else None
    if node.target is aten.sum.dim_IntList and node.args[2:] == (True,) and not node.kwargs:
        alone = node.args[1] and all(shape_of(given)[dim] == 1 for dim in node.args[1])  # type: ignore[index]
        return given if alone else None
    shaping = (aten.view.default, aten.expand.default, aten._unsafe_view.default)
    return given if node.target in shaping else None


def _joins(node: Any, product: Any, bias: Any) -> bool:
    """Whether a sum can be baddbmm(bias, product): matrices of one dtype, and a bias that is not larger."""
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or product.target is not aten.bmm.default:
        return False
    shapes = shape_of(node), shape_of(product), shape_of(bias)
    if len(product.users) > 1 or None in shapes or shapes[0] != shapes[1] or bias.meta["val"].dim() != 3:
        return False
    return bool(bias.meta["val"].dtype == product.meta["val"].dtype)
