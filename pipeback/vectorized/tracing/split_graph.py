"""Split graph: divides what AOTAutograd traces of n equal modules into F (forward) and B (backward), and what B needs
of the weights alone; or lets B recompute F.

Every function returns new graphs and does not change its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipeback.vectorized.tracing.graph_shapes import root_of, shape_of
from pipeback.vectorized.tracing.graphs import Graphs
from pipeback.vectorized.tracing.simplified_graph import simplified

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def split(
    forward: fx.GraphModule, backward: fx.GraphModule, weights: int, outputs: int, gives: Sequence[int]
) -> Graphs:
    """Return the graphs of AOTAutograd as `Graphs`. weights: the number of weights, which are the first inputs."""
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    ys, saved = list(output.args[0][:outputs]), list(output.args[0][outputs:])
    of_weights = _following(forward, set(inputs[:weights]))
    made = [node for node in saved if node in of_weights]
    rest = [node for node in saved if node not in of_weights]
    all_given = [node for node in backward.graph.nodes if node.op == "placeholder"]
    given, gs = all_given[: -len(gives)], all_given[-len(gives) :]
    there = dict(zip(saved, given, strict=True))
    kept: dict[fx.Node, list[fx.Node]] = {}  # what has another shape only is kept once
    for node in rest:
        kept.setdefault(root_of(_own(node)), []).append(there[node])
    roots = [_root(backward, root, mine) for root, mine in kept.items()]
    # weights will be written into, so that a copy of one stays a copy
    sent = [y if _own(y) in of_weights else _own(y) for y in ys]
    forwards = _between(forward, inputs, [*sent, *kept])
    backwards = _between(backward, [*roots, *(there[node] for node in made), *gs])
    of_weights_alone = _between(forward, inputs[:weights], made)
    each = [simplified(graph).forward for graph in (forwards, backwards, of_weights_alone)]
    return Graphs(each[0], each[1], each[2], outputs, gives=tuple(gives))


def _root(backward: fx.GraphModule, root: fx.Node, given: Sequence[fx.Node]) -> fx.Node:
    """Return an input of the backward that takes the place of these, which are `root` in other shapes."""
    part = backward.graph
    with part.inserting_before(next(iter(part.nodes))):
        one = part.placeholder(f"kept_{root.name}")
    one.meta = dict(root.meta)
    for node in given:
        with part.inserting_after(node):
            same = part.call_function(aten.reshape.default, (one, list(shape_of(node) or ())))
        same.meta = node.meta
        node.replace_all_uses_with(same)
        part.erase_node(node)
    return one


def _own(output: fx.Node) -> fx.Node:
    """Return the node of which an output is a copy that only kept it from being an input, since nobody writes into
    either; or the same tensor by another name.
    """
    while (output.target is aten.clone.default and not output.kwargs) or output.target in SAME:
        output = output.args[0]  # type: ignore[assignment]
    return output


def _following(graph: fx.GraphModule, known: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on these and on constants alone.

    What a module makes of an input of its own, such as the zeros with which a GRU begins, is not among them.
    """
    found, constants = set(known), set[fx.Node]()
    for node in graph.graph.nodes:
        before = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and all(b in constants for b in before)):
            constants.add(node)
        given = node.target in PRODUCTS and any(b in constants for b in before)
        if node.op == "call_function" and not given and all(b in found or b in constants for b in before):
            found.add(node)
    return found


def _between(
    graph: fx.GraphModule, inputs: Sequence[fx.Node], wanted: Sequence[fx.Node] | None = None
) -> fx.GraphModule:
    """Return the part of a graph that computes the nodes `wanted` (None: its outputs) from these inputs, in order."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    others = [node for node in graph.graph.nodes if node.op == "placeholder" and node not in inputs]
    for node in [*inputs, *others]:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = node.meta
    given = _copied(part, graph, copies)
    part.output(given if wanted is None else tuple(copies[node] for node in wanted))
    part.eliminate_dead_code()
    for node in others:
        part.erase_node(copies[node])
    return fx.GraphModule(graph, part)


def _copied(part: fx.Graph, graph: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> Any:
    """Copy the operations of a graph into another one and return its outputs there.

    copies: the nodes there of its inputs; all its nodes are added.
    """
    for node in graph.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: copies[n])
        if node not in copies:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    raise AssertionError("a graph ends with its outputs")


def recomputing(graphs: Graphs) -> Graphs:
    """Return graphs that save the inputs only: the backward recomputes the forward on the weights of that time.

    forward: (*weights, *X) -> (*Y, *X). backward: (*X, *weights, *G) -> the same gradients. made: returns the weights.
    """
    forward, backward, made = (graph.__self__ for graph in graphs[:3])  # type: ignore[attr-defined]
    known = sum(node.op == "placeholder" for node in made.graph.nodes)
    named = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    part = fx.Graph()
    xs = [part.placeholder(name) for name in named[known:]]
    weights = [part.placeholder(name) for name in named[:known]]
    gs = [part.placeholder(f"g_{n}") for n in graphs.gives]
    saved = _inlined(part, forward, [*weights, *xs])[graphs.outputs :]
    kept = _inlined(part, made, weights)
    part.output(tuple(_inlined(part, backward, [*saved, *kept, *gs])))
    part.eliminate_dead_code()
    again = fx.GraphModule(backward, part)

    def once(*given: Tensor) -> tuple[Tensor, ...]:
        return *graphs.forward(*given)[: graphs.outputs], *given[known:]

    return graphs._replace(forward=once, backward=again.forward, made=lambda *given: given)


def _inlined(part: Any, graph: fx.GraphModule, given: Sequence[fx.Node]) -> list[Any]:
    """Copy a graph into another one with the inputs `given`; return its outputs there."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, mine in zip(inputs, given, strict=True):
        mine.meta = node.meta
    return list(_copied(part, graph, dict(zip(inputs, given, strict=True))))
