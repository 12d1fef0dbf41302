"""Graph cuts: where the graph of a stage is cut, so that its backward can be done in two: see `split_backward`.

A cut is a node on the way to the input from which another way leads to weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Cuts(NamedTuple):
    """Where a graph is cut."""

    edges: Sequence[GradientEdge]  # at which I keeps gradients
    levels: Sequence[int]  # of each: how many cuts at most lie before it
    params: dict[int, list[Tensor]]  # those that W reaches from the cuts of a level
    roots: Sequence[int]  # the outputs from which no way leads to the input


class _Numbered(NamedTuple):
    """The same of all graphs of one form, whose nodes are others each time: nodes and weights by their numbers."""

    edges: list[tuple[int, int]]
    levels: Sequence[int]
    params: dict[int, list[int]]
    roots: Sequence[int]


class Forms:
    """The forms of the graphs of one stage, and where each is cut, or what keeps it whole."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], _Numbered | str] = {}

    def know(self, form: tuple[Any, ...], cuts: _Numbered | str) -> None:
        """Remember where graphs of a form are cut."""
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[form] = cuts


_MOST = 16  # forms that a stage remembers


def cut_again(
    forms: Forms, roots: Sequence[Any], leaves: Sequence[Tensor], params: Sequence[Tensor], *, late: bool = False
) -> Cuts | str:
    """As `cut`, without another search where the graph has the form of an earlier one, as most have."""
    starts = [y if isinstance(y, GradientEdge) else get_gradient_edge(y) for y in roots]
    known = {id(tensor): n for n, tensor in enumerate((*leaves, *params))}
    nodes: list[Any] = list(dict.fromkeys([edge.node for edge in starts]))
    numbers = {node: n for n, node in enumerate(nodes)}
    form: list[Any] = [late, len(leaves), *[part for edge in starts for part in (numbers[edge.node], edge.output_nr)]]
    for node in nodes:  # which grows
        form.append(type(node))
        there = node.next_functions
        for after, nr in there:
            if after is not None:
                n = numbers.setdefault(after, len(nodes))
                if n == len(nodes):
                    nodes.append(after)
                form += n, nr
        if not there and (leaf := getattr(node, "variable", None)) is not None:
            form += "leaf", known.get(id(leaf))
    key = tuple(form)
    found = forms.known.get(key)
    if found is None:
        cuts = cut(starts, leaves, params, late=late)
        if isinstance(cuts, str):
            found = cuts
        else:
            edges = [(numbers[edge.node], edge.output_nr) for edge in cuts.edges]
            reached = {level: [known[id(p)] - len(leaves) for p in some] for level, some in cuts.params.items()}
            found = _Numbered(edges, cuts.levels, reached, cuts.roots)
        forms.know(key, found)
    if isinstance(found, str):
        return found
    return Cuts(
        [GradientEdge(nodes[n], nr, None) for n, nr in found.edges], found.levels,
        {level: [params[n] for n in some] for level, some in found.params.items()}, found.roots,
    )  # fmt: skip


_INPUT, _WEIGHTS = 1, 2  # what a way leads to
# where an update may come before W: nodes whose gradients of weights do not depend on weights, and views of weights
_BY_INPUT = (
    "Add", "AddmmBackward", "Bmm", "Baddbmm", "Cat", "Convolution", "CudnnBatchNorm", "CudnnConvolution", "Embedding",
    "Linear", "MkldnnLinear", "Mm", "Mul", "NativeBatchNorm", "NativeGroupNorm", "NativeLayerNorm", "Stack", "Sub",
    "UnsafeView",
)  # fmt: skip
_VIEWS = (
    "AccumulateGrad", "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "Squeeze", "TBackward", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_FUSED = "MkldnnRnn", "CudnnRnn", "MiopenRnn", "ThnnFused"  # nodes that compute the gradients of both in one kernel


def cut(roots: Sequence[Any], leaves: Sequence[Tensor], params: Sequence[Tensor], *, late: bool = False) -> Cuts | str:
    """Where to cut the graph between these outputs and leaves, the inputs; or what keeps it whole, in words.

    late: whether the weights may be others at W.
    """
    starts = [y if isinstance(y, GradientEdge) else get_gradient_edge(y) for y in roots]
    given, own_ones = {id(leaf) for leaf in leaves}, {id(p) for p in params}
    nexts: dict[Any, list[Any]] = {}
    ways: dict[Any, int] = {}  # of every node; a node stands behind those that it leads to
    todo = [edge.node for edge in starts]
    while todo:
        node = todo[-1]
        there = nexts.get(node)
        if there is None:
            if why := _kept_whole(type(node)):
                return why
            there = nexts[node] = [edge for edge in node.next_functions if edge[0] is not None]
            if new := [after for after, _ in there if after not in nexts]:
                todo += new
                continue
        todo.pop()
        if node in ways:
            continue
        way = 0
        for after, _ in there:
            way |= ways[after]
        if not there and (leaf := getattr(node, "variable", None)) is not None:
            if id(leaf) not in given and id(leaf) not in own_ones:
                return "something that is no weight needs a gradient"
            way = _INPUT if id(leaf) in given else _WEIGHTS
        ways[node] = way
    cuts = _levels(starts, nexts, ways)
    if late and not isinstance(cuts, str):
        at = {edge.node for edge in cuts.edges}
        asked = [(node, _BY_INPUT) for node in at] + [(node, _VIEWS) for node, way in ways.items() if way == _WEIGHTS]
        for node, known in asked:
            if not (name := type(node).__name__).startswith(known):
                return f"{name.removesuffix('Backward0')} may need the weights again, and these are updated before"
    return cuts


@lru_cache(maxsize=512)
def _kept_whole(kind: type) -> str:
    """What keeps graphs with such nodes whole; "": nothing."""
    name = kind.__name__
    if issubclass(kind, FunctionCtx) or "CppNode" in name:
        return f"{name.removesuffix('Backward')} is an autograd function of its own"
    if name.startswith(_FUSED):
        return f"{name.removesuffix('Backward0')} computes both at once"
    return ""


def _levels(starts: Sequence[GradientEdge], nexts: dict[Any, list[Any]], ways: dict[Any, int]) -> Cuts | str:
    cuts = Cuts([], [], {}, [n for n, edge in enumerate(starts) if ways[edge.node] == _WEIGHTS])
    depth: dict[Any, int] = {}  # of nodes on the way to the input: cuts before them
    # of nodes that lead to weights alone: the depth of the cut that leads to them
    level: dict[Any, int] = {starts[n].node: 0 for n in cuts.roots}
    outputs: dict[Any, int] = {}  # of nodes on the way to the input: which of their outputs are used, as bits
    for node, nr, _ in starts:
        outputs[node] = outputs.get(node, 0) | 1 << nr
    for node, way in reversed(ways.items()):
        there, beside = nexts[node], []
        if way & _INPUT:
            here, onwards = depth.get(node, 0), []
            for edge in there:
                if ways[edge[0]] & _INPUT:
                    onwards.append(edge)
                elif ways[edge[0]]:
                    beside.append(edge[0])
            deeper = here + 1 if beside else here
            for after, nr in onwards:
                outputs[after] = outputs.get(after, 0) | 1 << nr
                if depth.get(after, 0) < deeper:
                    depth[after] = deeper
            if beside:
                bits = outputs[node]
                some = [GradientEdge(node, nr, None) for nr in range(bits.bit_length()) if bits >> nr & 1]
                cuts.edges.extend(some)  # type: ignore[attr-defined]
                cuts.levels.extend([here] * len(some))  # type: ignore[attr-defined]
        elif way == _WEIGHTS:
            here = level[node]
            beside = [after for after, _ in there if ways[after] == _WEIGHTS]
            if not there:
                cuts.params.setdefault(here, []).append(node.variable)
        for after in beside:
            if level.setdefault(after, here) != here:
                return "a weight is used again on what was computed with it"
    return cuts
