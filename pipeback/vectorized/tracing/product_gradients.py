"""Product gradients: gradients of weights that are products of matrices. They are added to the momentum by the product
itself, or given as its two factors, and so never take a pass through memory of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from pipeback.vectorized.tracing.capture import Unfit
from pipeback.vectorized.tracing.graph_shapes import root_of, shape_of
from pipeback.vectorized.tracing.graphs import ADDED, Graph, Graphs

aten = torch.ops.aten


def accumulating(graphs: Graphs, weights: int, trained: Sequence[int]) -> Graph:
    """Return the backward with momentum: (*saved, *made, *G, m, m as a tensor, *v) -> gradients of X.

    It does v ← m·v + g in place for those of the weights that are numbered `trained`. A gradient g that is one matrix
    product is added to v by that product, and is never a tensor of its own. Raises `Unfit` if one of them has no
    gradient, since it was frozen when the backward was traced.
    """
    graph: Any = graphs.backward.__self__  # type: ignore[attr-defined]  # the module that it is the forward of
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.placeholder(node.name)
    momentum, factor = part.placeholder("momentum"), part.placeholder("factor")
    velocities = [part.placeholder(f"velocity_{n}") for n in trained]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    grads, gxs = output.args[0][:weights], output.args[0][weights:]
    there = [(grads[n], v) for n, v in zip(trained, velocities, strict=True)]
    if any(grad is None for grad, _ in there):
        raise Unfit("a weight was frozen before what had been pushed was done")
    products = {root_of(grad): v for grad, v in there if _product(grad, grads)}
    whole = [v for node, v in products.items() if node.target in ADDED]
    if others := [v for v in velocities if v not in whole]:  # torch refuses an empty list
        part.call_function(torch._foreach_mul_, (others, factor))
    for node in graph.graph.nodes:
        if node in products:
            pair, v = tuple(copies[a] for a in node.args), products[node]
            if node not in grads:  # the gradient is the product in another shape
                v = part.call_method("view", (v, list(shape_of(node) or ())))
            if node.target in ADDED:
                part.call_method(ADDED[node.target], (v, *pair), {"beta": momentum})
            else:
                part.call_method("addcmul_", (v, *pair))
        elif node.op not in ("placeholder", "output") and root_of(node) not in products:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    apart = [(v, copies[grad]) for grad, v in there if root_of(grad) not in products]
    if apart:
        part.call_function(torch._foreach_add_, ([v for v, _ in apart], [g for _, g in apart]))
    part.output([None if gx is None else copies[gx] for gx in gxs])
    return fx.GraphModule(graph, part).forward


def products(graphs: Graphs, trained: Sequence[int]) -> list[int]:
    """Return the numbers of those of the weights `trained` whose gradient is a matrix product of more than a column
    with a row, which is as fast to compute as to add.
    """
    graph: Any = graphs.backward.__self__  # type: ignore[attr-defined]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    given = output.args[0]
    return [n for n in trained if _product(given[n], given) and root_of(given[n]).target in ADDED]


def factored(backward: Graph, which: Sequence[int]) -> tuple[Graph, list[int]]:
    """Return a backward that gives the two factors of gradients that are products, and the numbers of these weights.

    The factors are its last outputs, two per weight. The gradients of other weights stay, as do products of columns
    with rows, which a compiler computes where they are used.
    """
    graph: Any = copy.deepcopy(backward.__self__)  # type: ignore[attr-defined]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    given = list(output.args[0])
    direct = [n for n in which if _product(given[n], given) and root_of(given[n]) is given[n]]
    found = [n for n in direct if not _of_columns(given[n])]
    pairs = [factor for n in found for factor in given[n].args]
    output.args = (tuple(None if n in found else node for n, node in enumerate(given)) + tuple(pairs),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return cast(Graph, graph.forward), found


def _product(grad: Any, given: Sequence[Any]) -> bool:
    """Whether a gradient is one product, perhaps in another shape, which is the gradient of one weight only and is not
    used elsewhere.
    """
    if not isinstance(grad, fx.Node):
        return False
    root, node = root_of(grad), grad
    outer = root.target is aten.mul.Tensor and _columns(root)
    alone = given.count(grad) == 1
    while alone and node is not root:
        alone, node = len(node.users) == 1, node.args[0]  # type: ignore[assignment]
    return (outer or root.target in ADDED) and alone and len(root.users) == 1


def _of_columns(product: Any) -> bool:
    """Whether a product is (…, a, 1) · (…, 1, b), as far as the known shapes tell."""
    left, right = (shape_of(a) for a in product.args)
    return (left is not None and left[-1] == 1) or (right is not None and right[-2] == 1)


def _columns(node: Any) -> bool:
    """Whether a node is a product (…, a, 1) · (…, 1, b) of matrices, written as a broadcast multiplication."""
    left, right = (shape_of(a) for a in node.args)
    if left is None or right is None or len(left) != len(right) or len(left) not in (2, 3):
        return False
    return left[-1] == right[-2] == 1
