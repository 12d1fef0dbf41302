"""Weight views: the part of a graph that only looks at weights in another shape. It need be done only once, since views
change with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipeback.vectorized.tracing.graphs import Graph

LOOKS = {torch.transpose, torch.t, torch.permute, torch.unsqueeze, torch.squeeze, torch.select, "reshape", "expand"}


def split(forward: Graph, weights: int) -> tuple[Graph, Graph]:
    """Return two graphs that do the same as one after the other: (*weights) -> views, and (*views, *X) -> the outputs.

    forward: (*weights, *X) -> the outputs, for direct calls (`graphs.direct`).
    """
    module: Any = forward.__self__  # type: ignore[attr-defined]
    looks, rest, seen = fx.Graph(), fx.Graph(), dict[fx.Node, fx.Node]()
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in given[:weights]:
        seen[node] = looks.placeholder(node.name)
    for node in module.graph.nodes:
        if node.op.startswith("call") and node.target in LOOKS and all(n in seen for n in node.all_input_nodes):
            seen[node] = looks.node_copy(node, lambda n: seen[n])
    handed = [node for node in seen if any(user not in seen for user in node.users)]
    looks.output(tuple(seen[node] for node in handed))
    copies = {node: rest.placeholder(node.name) for node in [*handed, *given[weights:]]}
    for node in module.graph.nodes:
        if node not in seen and node not in copies:
            copies[node] = rest.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(module, looks).forward, fx.GraphModule(module, rest).forward


def shared(views: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether these are views of the weights, and no copies."""
    own = {w.untyped_storage().data_ptr() for w in weights}
    return all(t.untyped_storage().data_ptr() in own for t in views)
