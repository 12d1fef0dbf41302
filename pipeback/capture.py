"""Capture: what n equal modules do side by side, forward and backward, as two graphs.

The forward takes the weights of all (n, …) and their inputs X (n, …), and gives the outputs Y (n, …) and what the
backward needs. `torch.func.vmap` writes the batched operations, AOTAutograd the two graphs. What the backward needs of
the weights alone is no output of the forward: it is made from the weights that are in force when the backward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

Graph = Callable[..., Any]  # the forward of a GraphModule, whose own call costs as much as an operation
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
    return Graphs(*(_simplified(graph).forward for graph in found))


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
    for node in part.nodes:
        if _outer(node):  # faster so, and a compiler joins it with what uses it
            node.target = aten.mul.Tensor
    graph.recompile()
    return graph


def _turned(node: Any) -> bool:
    """Whether it is (a b)ᵀ, which as bᵀ aᵀ lies in memory as the weight does whose gradient it is."""
    product = node.args[0] if node.target is aten.transpose.int and tuple(node.args[1:]) == (1, 2) else None
    return isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1


def _outer(node: Any) -> bool:
    """Whether it is a product of columns with rows."""
    inner = _shape(node.args[0]) if node.op == "call_function" and node.target is aten.bmm.default else None
    return inner is not None and inner[-1] == 1


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


def recomputing(graphs: Graphs) -> Graphs:
    """The same, keeping the inputs alone: the backward does the forward once more, on the weights that are in force
    then. forward: (*weights, X) -> (Y, X). backward: (X, *weights, G) -> as ever. made: the weights.
    """
    forward, backward, made = (graph.__self__ for graph in graphs)  # type: ignore[attr-defined]
    *names, _ = [node for node in forward.graph.nodes if node.op == "placeholder"]
    part = fx.Graph()
    x, weights = part.placeholder("x"), [part.placeholder(node.name) for node in names]
    g = part.placeholder("g")
    _, *saved = _inlined(part, forward, [*weights, x])
    kept = _inlined(part, made, weights)
    part.output(tuple(_inlined(part, backward, [*saved, *kept, g])))
    part.eliminate_dead_code()
    again = fx.GraphModule(backward, part)

    def once(*given: Tensor) -> tuple[Tensor, Tensor]:
        return graphs.forward(*given)[0], given[-1]

    return Graphs(once, again.forward, lambda *given: given)


def _inlined(part: Any, graph: fx.GraphModule, given: Sequence[fx.Node]) -> list[Any]:
    """Put a graph into another one; returns its outputs there."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    copies = dict(zip(inputs, given, strict=True))
    for node, mine in copies.items():
        mine.meta = node.meta
    outputs: Any = None
    for node in graph.graph.nodes:
        if node.op == "output":
            outputs = fx.map_arg(node.args[0], lambda n: copies[n])
        elif node not in copies:
            copies[node] = part.node_copy(node, lambda n: copies[n])
    return list(outputs)


def accumulating(graphs: Graphs, trained: Sequence[int]) -> Graph:
    """The backward with momentum: (*saved, *made, G, m, m as a tensor, *v) -> gradient of X, and v ← m·v + g in place,
    of the weights of the numbers `trained`. A gradient that is one product is added by it, and never written apart.
    """
    graph: Any = graphs.backward.__self__  # type: ignore[attr-defined]  # the module that it is the forward of
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.placeholder(node.name)
    momentum, factor = part.placeholder("momentum"), part.placeholder("factor")
    velocities = [part.placeholder(f"velocity_{n}") for n in trained]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    *grads, gx = output.args[0]
    there = [(grads[n], v) for n, v in zip(trained, velocities, strict=True)]
    products = {grad: v for grad, v in there if _product(grad, grads)}
    whole = [v for node, v in products.items() if node.target is aten.bmm.default]
    part.call_function(torch._foreach_mul_, ([v for v in velocities if v not in whole], factor))
    for node in graph.graph.nodes:
        if node in products:
            pair = tuple(copies[a] for a in node.args)
            if node.target is aten.bmm.default:
                part.call_method("baddbmm_", (products[node], *pair), {"beta": momentum})
            else:
                part.call_method("addcmul_", (products[node], *pair))
        elif node.op not in ("placeholder", "output"):
            copies[node] = part.node_copy(node, lambda n: copies[n])
    apart = [(v, copies[grads[n]]) for n, v in zip(trained, velocities, strict=True) if grads[n] not in products]
    if apart:
        part.call_function(torch._foreach_add_, ([v for v, _ in apart], [g for _, g in apart]))
    part.output(copies[gx])
    return fx.GraphModule(graph, part).forward


def for_compiler(graphs: Graphs) -> Graphs:
    """The same graphs with rows times matrices written so that inductor leaves them to a library: its own loop for
    them, in one kernel with all the rest, goes through the matrix against its strides.
    """
    return Graphs(*map(_left_alone, graphs))


def _left_alone(forward: Graph) -> Graph:
    whole = getattr(forward, "__self__", None)
    if whole is None:  # no graph, but a function around one
        return forward
    graph: Any = copy.deepcopy(whole)
    part = graph.graph
    for node in list(part.nodes):
        shape = _shape(node) if node.op == "call_function" and node.target is aten.bmm.default else None
        if shape is not None and shape[1] == 1 and shape[2] > 1:
            with part.inserting_before(node):
                any_one = part.call_function(aten.slice.Tensor, (node.args[0], 2, 0, 1))
                one = part.call_function(aten.baddbmm.default, (any_one, *node.args), {"beta": 0})
            one.meta = node.meta
            node.replace_all_uses_with(one)
            part.erase_node(node)
    graph.recompile()
    return cast(Graph, graph.forward)


def factored(backward: Graph, which: Sequence[int]) -> tuple[Graph, list[int]]:
    """A backward that gives, instead of the gradients of these weights, what they are products of: its last outputs,
    two for each weight of the numbers that come with it. Those of other weights stay.
    """
    graph: Any = copy.deepcopy(backward.__self__)  # type: ignore[attr-defined]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    given = list(output.args[0])
    found = [n for n in which if _product(given[n], given)]
    pairs = [factor for n in found for factor in given[n].args]
    output.args = (tuple(None if n in found else node for n, node in enumerate(given)) + tuple(pairs),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return cast(Graph, graph.forward), found


def _product(grad: Any, given: Sequence[Any]) -> bool:
    """Whether a gradient is one product, of which nothing else is made, and of one weight of those given."""
    outer = grad.target is aten.mul.Tensor and _columns(grad)
    return (outer or grad.target is aten.bmm.default) and len(grad.users) == 1 and given.count(grad) == 1


def _columns(node: Any) -> bool:
    """Whether it is a product (n, a, 1) · (n, 1, b) of what is broadcast."""
    left, right = (_shape(a) for a in node.args)
    return left is not None and right is not None and len(left) == len(right) == 3 and left[2] == right[1] == 1


def judged(module: nn.Module, loss: Callable[[Any, Any], Tensor], x: Tensor, target: Any) -> Graph:
    """What the stage with the loss does, as one graph: (*weights, X, target) -> (loss, gradient of X, *gradients of the
    weights that train).

    Raises `Unfit` where torch cannot write it so.
    """
    weights = dict(module.named_parameters())
    trained = [name for name, p in weights.items() if p.requires_grad]

    def both(*given: Any) -> Any:
        values, x, target = dict(zip(weights, given, strict=False)), given[-2], given[-1]

        def of(x: Tensor, some: Mapping[str, Tensor]) -> Tensor:
            return loss(functional_call(module, {**values, **some}, (x,)), target)

        (gx, grads), found = grad_and_value(of, argnums=(0, 1))(x, {name: values[name] for name in trained})
        return found, gx, *(grads[name] for name in trained)

    try:
        graph = _simplified(make_fx(both)(*(p.detach() for p in weights.values()), x, target))
    except Exception as error:  # whatever the user's code and torch make of it
        raise Unfit(f"torch cannot write it as one graph: {str(error).strip().partition(chr(10))[0]}") from error
    return graph.forward


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What modules must have in common to be run as one, as far as it shows."""
    parts = [(type(m).__qualname__, m.extra_repr(), m.training) for m in module.modules()]
    weights = [(tuple(p.shape), p.dtype, p.device, p.requires_grad) for p in module.parameters()]
    return (*parts, *weights)
