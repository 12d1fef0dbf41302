"""Failed graph: which of several graphs an autograd call has failed in, when it differentiated them all at once.

Autograd goes from the newest graph to the oldest, and a graph that it has passed has let go of what it had saved. So
the newest one that still holds something has failed, unless the error itself shows where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

from pipeback.private import holds, newness


def failed(graphs: Sequence[Sequence[Any]], error: BaseException) -> int:
    """The number of the graph that failed. graphs: the roots of each, tensors or the edges at which it begins; upstream
    first where one leads to another, whose nodes are not counted as its own.
    """
    if len(graphs) == 1:
        return 0
    seen: set[Any] = set()
    nodes = [list(_nodes(roots, seen)) for roots in graphs]
    shown = {id(value) for value in _locals(error)}
    for n, graph in enumerate(nodes):
        if any(id(node) in shown for node in graph):  # a torch.autograd.Function, whose backward has raised
            return n
    there = sorted((n for n, graph in enumerate(nodes) if graph), key=lambda n: -newness(nodes[n][0]))
    return next((n for n in there if any(map(holds, nodes[n]))), there[-1] if there else 0)


def _nodes(roots: Sequence[Any], seen: set[Any]) -> Iterator[Any]:
    """The nodes of the graph behind these roots, a root first, without those that were seen before."""
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in reversed(roots)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(parent for parent, _ in node.next_functions)


def _locals(error: BaseException) -> Iterator[Any]:
    """The values in the frames through which an error came."""
    at = error.__traceback__
    while at is not None:
        yield from at.tb_frame.f_locals.values()
        at = at.tb_next
