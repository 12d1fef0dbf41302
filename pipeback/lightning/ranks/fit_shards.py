"""Fit shards: what this rank has of weights that several ranks share, where the LightningModule has them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeback.pipeline.arguments import TensorParallel
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup
from pipeback.tensor_parallel.spread import Spread, spread


class FitShards:
    """This rank's shards of the module that is trained, of which it is number `index`.

    Ranks that compute stages together call `whole` and `states` alike.
    """

    def __init__(self, tensor: TensorParallel, index: int) -> None:
        self.size, self._plan, self.group = tensor.size, tensor.plan, TensorGroup(index, tensor.size)
        self._cuts: dict[str, Cut] = {}  # by the name of a weight
        self._of: dict[int, Cut] = {}  # by the identity of the user's weight

    def spread(self, copy: nn.Module, user: nn.Module) -> Spread | None:
        """Cut a copy of the user's module into shards; None if one rank computes each stage."""
        if self.size == 1:
            return None
        found = spread(copy, self._plan, self.group)
        pairs = zip(copy.named_parameters(), user.parameters(), strict=True)
        known = [(name, theirs, found.cuts[id(mine)]) for (name, mine), theirs in pairs if id(mine) in found.cuts]
        self._cuts = {name: cut for name, _, cut in known}
        self._of = {id(theirs): cut for _, theirs, cut in known}
        return found

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights and buffers from those of all ranks that compute these stages."""
        cuts = self._cuts
        return {k: cuts[k].whole(self.group.collect(v)) if k in cuts else v for k, v in values.items()}

    def piece(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's shards of the optimizer's state of the user's weight p."""
        cut = self._of.get(id(p))
        if cut is None:
            return state
        index, count = self.group.index, self.group.count
        return {k: cut.shard(v, index, count) if _is(v, p.shape) else v for k, v in state.items()}

    def states(self, states: Mapping[int, dict[str, Any]], weights: Sequence[nn.Parameter]) -> dict[int, Any]:
        """The optimizer's whole state, by the number of a weight, from those of all ranks that compute its stage."""
        found = {}
        for n, state in states.items():
            cut, p = self._of.get(id(weights[n])), weights[n]
            if cut is not None:
                shape = cut.shape(p.shape, self.group.count)
                state = {k: cut.whole(self.group.collect(v)) if _is(v, shape) else v for k, v in state.items()}
            found[n] = state
        return found


def _is(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
