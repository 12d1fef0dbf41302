"""Graph rewrites: rewrite the forward and the backward of n equal modules for speed, join the backward with the
momentum update, or let it recompute the forward.

Every function returns new graphs and does not change its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from pipeback.vectorized.graph_shapes import merged, root_of, shape_of

Graph = Callable[..., Any]  # the forward of a GraphModule; calling the module itself costs an operation more
aten = torch.ops.aten


# torch's own bindings of operators, which cost half as much per call, since they do not look up the schema
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: torch.mul, aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.div.Tensor: torch.div,
    aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm, aten.t.default: torch.t, aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute, aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dim: torch.squeeze,
    aten.select.int: torch.select, aten.relu.default: torch.relu, aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid, aten.exp.default: torch.exp, aten.clone.default: torch.clone,
    aten.sum.dim_IntList: torch.sum, aten.native_layer_norm.default: torch.native_layer_norm,
}  # fmt: skip
# "reshape", not "view": tensors saved by F come back contiguous, with other strides than in the trace
ADDED = {aten.bmm.default: "baddbmm_", aten.mm.default: "addmm_"}  # what adds a product of matrices to a tensor
VIEWS = {aten.view.default: "reshape", aten.reshape.default: "reshape", aten.expand.default: "expand"}


class Graphs(NamedTuple):
    """The forward (F) and the backward (B) of n equal modules as graphs, whose tensors have the n rows as dimension 0.

    forward: (*weights, *X) -> (*Y, *saved). backward: (*saved, *made, *G) -> (*gradients of the weights, None where
    frozen; *gradients of X, None where there is none). made: (*weights) -> tensors that depend on the weights alone and
    that the backward needs. outputs: the number of Y. packs: whether a stage sends them as a tuple. gives: the numbers
    of those Y for which the backward is given a gradient. Only saved tensors may have the rows folded into another dimension. With one module alone (n = 1) no tensor
    has the dimension of the rows.
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
    forwards = _between(forward, inputs, [*map(_own, ys), *kept])
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
    """Return the node of which an output is a copy that only kept it from being an input: nobody writes into either."""
    while output.target is aten.clone.default and not output.kwargs:
        output = output.args[0]  # type: ignore[assignment]
    return output


def _following(graph: fx.GraphModule, known: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on these and on constants alone."""
    found = set(known)
    for node in graph.graph.nodes:
        before = node.all_input_nodes
        if node.op == "call_function" and all(b in found or b.op == "get_attr" for b in before):
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


def simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without operations that change nothing, and with biases added by the matrix products.

    One operation costs as much as the arithmetic of a small layer. Gradients are as contiguous as their weights.
    """
    part: Any = graph.graph
    for node in list(part.nodes):
        same = _undone(node) if node.op == "call_function" else None
        if same is not None:
            node.replace_all_uses_with(same)
            part.erase_node(node)
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
        if before.target is aten.t.default:
            return part.call_function(aten.t.default, (matrix,))
        return part.call_function(aten.transpose.int, (matrix, 1, 2))


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


def accumulating(graphs: Graphs, weights: int, trained: Sequence[int]) -> Graph:
    """Return the backward with momentum: (*saved, *made, *G, m, m as a tensor, *v) -> gradients of X.

    It does v ← m·v + g in place for those of the weights that are numbered `trained`. A gradient g that is one matrix product is added to
    v by that product, and is never a tensor of its own.
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
    """Return the numbers of those of the weights `trained` whose gradient is a matrix product."""
    graph: Any = graphs.backward.__self__  # type: ignore[attr-defined]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return [n for n in trained if _product(output.args[0][n], output.args[0])]


def direct(forward: Graph) -> Graph:
    """Return the same graph with cheaper calls of operators, to run it without a compiler."""
    whole = getattr(forward, "__self__", None)
    if whole is None:  # a function around a graph
        return forward
    graph: Any = copy.deepcopy(whole)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in VIEWS:
            node.op, node.target = "call_method", VIEWS[node.target]
        elif node.op == "call_function":
            node.target = BINDINGS.get(node.target, node.target)
    graph.recompile()
    return cast(Graph, graph.forward)


def for_compiler(graphs: Graphs) -> Graphs:
    """Return the graphs with products of rows and matrices written so that inductor calls a library for them: its own
    fused loop would read the matrix against its strides.
    """
    return graphs.each(_left_alone)


def _left_alone(forward: Graph) -> Graph:
    whole = getattr(forward, "__self__", None)
    if whole is None:  # a function around a graph
        return forward
    graph: Any = copy.deepcopy(whole)
    part = graph.graph
    for node in list(part.nodes):
        shape = shape_of(node) if node.op == "call_function" and node.target is aten.bmm.default else None
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
