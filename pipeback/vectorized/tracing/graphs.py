"""Graphs: the forward (F) and the backward (B) of n equal modules, and how they are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule

from pipeback.vectorized.tracing.graph_shapes import shape_of

Graph = Callable[..., Any]  # the forward of a GraphModule; calling the module itself costs an operation more
aten = torch.ops.aten


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax along a dimension, and 0 where all of x is −∞, as in attention that sees nothing.

    torch's operation looks for such places in all of x, which on a CPU takes four times as long as the softmax. But the
    softmax itself is NaN there.
    """
    if x.is_cpu and x.shape[dim]:
        found = torch.softmax(x, dim, dtype=dtype)
        if not found.select(dim, 0).isnan().any():
            return found
    safe: Tensor = aten._safe_softmax.default(x, dim, dtype)
    return safe


# torch's own bindings of operators, which cost half as much per call, since they do not look up the schema
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: torch.mul, aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.div.Tensor: torch.div,
    aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm, aten.t.default: torch.t, aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute, aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dim: torch.squeeze,
    aten.select.int: torch.select, aten.relu.default: torch.relu, aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid, aten.exp.default: torch.exp, aten.clone.default: torch.clone,
    aten.sum.dim_IntList: torch.sum, aten.native_layer_norm.default: torch.native_layer_norm,
    aten._safe_softmax.default: safe_softmax,
}  # fmt: skip
ADDED = {aten.bmm.default: "baddbmm_", aten.mm.default: "addmm_"}  # what adds a product of matrices to a tensor
# "reshape", not "view": tensors saved by F come back contiguous, with other strides than in the trace
VIEWS = {aten.view.default: "reshape", aten.reshape.default: "reshape", aten.expand.default: "expand"}


class Graphs(NamedTuple):
    """The forward (F) and the backward (B) of n equal modules as graphs, whose tensors have the n rows as dimension 0.

    forward: (*weights, *X) -> (*Y, *saved). backward: (*saved, *made, *G) -> (*gradients of the weights, None where
    frozen; *gradients of X, None where there is none). made: (*weights) -> tensors that depend on the weights alone and
    that the backward needs. outputs: the number of Y. packs: whether a stage sends them as a tuple. gives: the numbers
    of those Y for which the backward is given a gradient. Only saved tensors may have the rows folded into another
    dimension. With one module alone (n = 1) no tensor has the dimension of the rows.
    """

    forward: Graph
    backward: Graph
    made: Graph
    outputs: int = 1
    packs: bool = False
    gives: tuple[int, ...] = (0,)

    def each(self, change: Callable[[Graph], Graph]) -> Graphs:
        """Return the same with every graph changed so."""
        return self._replace(forward=change(self.forward), backward=change(self.backward), made=change(self.made))


_DIRECT: WeakKeyDictionary[Any, Graph] = WeakKeyDictionary()  # of each module what `direct` made of it


def direct(forward: Graph) -> Graph:
    """Return the same graph with cheaper calls of operators, to run it without a compiler."""
    whole = getattr(forward, "__self__", None)
    if whole is None:  # a function around a graph
        return forward
    if whole not in _DIRECT:
        graph = copy.deepcopy(whole.graph)
        for node in graph.nodes:
            if node.op == "call_function" and node.target in VIEWS:
                node.op, node.target = "call_method", VIEWS[node.target]
            elif node.op == "call_function":
                node.target = BINDINGS.get(node.target, node.target)
        _DIRECT[whole] = GraphModule(whole, graph).forward
    return _DIRECT[whole]


def for_compiler(graphs: Graphs) -> Graphs:
    """Return the graphs with products of rows and matrices written so that inductor calls a library for them: its own
    fused loop would read the matrix against its strides.
    """
    return graphs.each(_left_alone)


def _left_alone(forward: Graph) -> Graph:
    whole = getattr(forward, "__self__", None)
    if whole is None:  # a function around a graph
        return forward
    part = copy.deepcopy(whole.graph)
    for node in list(part.nodes):
        shape = shape_of(node) if node.op == "call_function" and node.target is aten.bmm.default else None
        if shape is not None and shape[1] == 1 and shape[2] > 1:
            with part.inserting_before(node):
                any_one = part.call_function(aten.slice.Tensor, (node.args[0], 2, 0, 1))
                one = part.call_function(aten.baddbmm.default, (any_one, *node.args), {"beta": 0})
            one.meta = node.meta
            node.replace_all_uses_with(one)
            part.erase_node(node)
    return GraphModule(whole, part).forward
