"""Capture: what n equal modules do side by side, forward and backward, as two graphs.

The forward takes the weights of all (n, …) and their inputs X (n, …), and gives the outputs Y (n, …) and what the
backward needs. `torch.func.vmap` writes the batched operations, AOTAutograd the two graphs. What the backward needs of
the weights alone is no output of the forward: it is made from the weights that are in force when the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

Graph = Callable[..., Any]
aten = torch.ops.aten


class Unfit(ValueError):
    """These modules cannot run as one; the message says why, to follow "stages 2 … 5: "."""


class Graphs(NamedTuple):
    """forward: (*weights, X) -> (Y, *saved). backward: (*saved, *made, G) -> (*gradients of the weights, None where
    frozen; gradient of X). made: (*weights) -> what the backward needs of these alone. Rows come first in all of them,
    but of a saved tensor, where they may be folded into any dimension.
    """

    forward: Graph
    backward: Graph
    made: Graph


def capture(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Graphs:
    """Graphs of n modules like this one. weights: (n, …) by name, those that train require a gradient; x: (n, …).

    Raises `Unfit` where torch cannot write it for n modules at once.
    """
    found: dict[str, fx.GraphModule] = {}
    names = list(weights)

    def one(values: Sequence[Tensor], x: Tensor) -> Any:
        return functional_call(module, dict(zip(names, values, strict=True)), (x,))

    def all_of_them(*given: Tensor) -> Any:
        return vmap(one)(given[:-1], given[-1])

    def keep(which: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compiler(graph: fx.GraphModule, example: Any) -> Any:
            found[which] = graph
            return make_boxed_func(graph.forward)

        return compiler

    function = aot_function(all_of_them, keep("forward"), keep("backward"), partition_fn=default_partition)
    given = [w.detach().clone().requires_grad_(w.requires_grad) for w in weights.values()]
    try:
        # kernels of attention have no rule for n modules at once; in plain operations it has
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            y = function(*given, x.detach().clone().requires_grad_())
            if not isinstance(y, Tensor):
                raise Unfit(f"the output is a {type(y).__name__}, and not a tensor")
            if y.shape != x.shape or y.dtype != x.dtype:
                raise Unfit(f"the output {tuple(y.shape[1:])} has another form than the input {tuple(x.shape[1:])}")
            y.backward(torch.ones_like(y))
    except Unfit:
        raise
    except Exception as error:  # whatever the user's code and torch make of it
        raise Unfit(f"torch cannot run them as one: {str(error).strip().partition(chr(10))[0]}") from error
    if found.keys() != {"forward", "backward"}:
        raise Unfit("there is nothing to train in them")
    return _graphs(found["forward"], found["backward"], len(names))


def _graphs(forward: fx.GraphModule, backward: fx.GraphModule, weights: int) -> Graphs:
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    y, *saved = output.args[0]
    of_weights = _following(forward, set(inputs[:weights]))
    made = [node for node in saved if node in of_weights]
    kept = [node for node in saved if node not in of_weights]
    order = [saved.index(node) for node in kept + made]
    found = _giving(forward, inputs, [y, *kept]), _taking(backward, order), _giving(forward, inputs[:weights], made)
    return Graphs(*map(_simplified, found))


def _following(graph: fx.GraphModule, known: set[fx.Node]) -> set[fx.Node]:
    """The nodes that follow from these and constants alone."""
    found = set(known)
    for node in graph.graph.nodes:
        before = node.all_input_nodes
        if node.op == "call_function" and all(b in found or b.op == "get_attr" for b in before):
            found.add(node)
    return found


def _simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Without operations that change nothing, and with biases added by the products: an operation costs as much as the
    arithmetic of a small layer. Gradients of weights come as contiguous as these are."""
    part: Any = graph.graph
    for node in list(part.nodes):
        if node.op == "call_function" and _idle(node):
            node.replace_all_uses_with(node.args[0])
            part.erase_node(node)
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
                one = part.call_function(aten.bmm.default, (first, second))
            one.meta = node.meta
            node.replace_all_uses_with(one)
    part.eliminate_dead_code()
    graph.recompile()
    return graph


def _turned(node: Any) -> bool:
    """Whether it is (a b)ᵀ, which as bᵀ aᵀ lies in memory as the weight does whose gradient it is."""
    product = node.args[0] if node.target is aten.transpose.int and tuple(node.args[1:]) == (1, 2) else None
    return isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1


def _transposed(part: Any, before: Any, matrix: Any) -> Any:
    if matrix.target is aten.transpose.int and tuple(matrix.args[1:]) == (1, 2):
        return matrix.args[0]
    with part.inserting_before(before):
        return part.call_function(aten.transpose.int, (matrix, 1, 2))


def _idle(node: Any) -> bool:
    """Whether it gives what it is given."""
    if node.target in (aten.detach.default, aten.alias.default):
        return True
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return _shape(node) is not None and node.meta["val"].dtype == node.args[0].meta["val"].dtype
    shaping = (aten.view.default, aten.expand.default, aten._unsafe_view.default)
    return node.target in shaping and _shape(node) is not None and _shape(node) == _shape(node.args[0])


def _joins(node: Any, product: Any, bias: Any) -> bool:
    """Whether the sum is baddbmm(bias, product): of matrices, of one type, with a bias that is not larger."""
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or product.target is not aten.bmm.default:
        return False
    shapes = _shape(node), _shape(product), _shape(bias)
    if len(product.users) > 1 or None in shapes or shapes[0] != shapes[1] or bias.meta["val"].dim() != 3:
        return False
    return bool(bias.meta["val"].dtype == product.meta["val"].dtype)


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _giving(graph: fx.GraphModule, inputs: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph from these inputs to these nodes."""
    needed: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(graph, part)


def _taking(graph: fx.GraphModule, order: Sequence[int]) -> fx.GraphModule:
    """The graph, its inputs but the last one in this order."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in [*(inputs[n] for n in order), inputs[-1]]:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.graph.nodes:
        if node.op == "output":
            part.output(fx.map_arg(node.args[0], lambda n: copies[n]))
        elif node not in copies:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(graph, part)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What modules must have in common to be run as one, as far as it shows."""
    parts = [(type(m).__qualname__, m.extra_repr(), m.training) for m in module.modules()]
    weights = [(tuple(p.shape), p.dtype, p.device, p.requires_grad) for p in module.parameters()]
    return (*parts, *weights)
