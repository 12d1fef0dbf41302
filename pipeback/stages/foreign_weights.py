"""Foreign weights: those of the model that a stage uses and does not have, so that nobody would train them.

A module that is not looked into may reach a weight of another one, through an attribute that holds its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pipeback.stages.saved_graph import nodes
from pipeback.stages.stage import Stage


def refuse(stage: Stage, roots: Sequence[Tensor], weights: Mapping[int, str]) -> None:
    """Raise ValueError if the graph above `roots` uses one. weights: the names of the model's, by identity."""
    own = {id(p) for p in stage.params}
    for node in nodes(roots):
        used = id(getattr(node, "variable", None))
        if used in weights and used not in own:
            name = weights[used]
            raise ValueError(
                f"{stage.label}: its forward uses the weight {name!r} of the model, which is in no module of this "
                "stage, so that it would not be trained; keep it as an attribute of the module that uses it, too: "
                f"self.{name.rpartition('.')[2]} = the weight"
            )
