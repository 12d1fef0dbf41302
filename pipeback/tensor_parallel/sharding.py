"""Sharding: what a rank holds of one stage; the whole of its state from all ranks, and the shards of a whole state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.tensor_parallel import flights
from pipeback.tensor_parallel.cuts import Cut
from pipeback.tensor_parallel.group import TensorGroup


class Sharding:
    """The weights of a stage of which this rank has shards.

    named: all weights of the stage, by name. cuts: how those that are cut are, by identity. data_dependent: whether
    what ranks exchange depends on the data, as tokens on the way to experts do.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], cuts: Mapping[int, Cut], group: TensorGroup,
        data_dependent: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.data_dependent = group, data_dependent
        self.cuts: dict[str, Cut] = {name: cuts[id(p)] for name, p in named if id(p) in cuts}
        self.shapes = {name: tuple(p.shape) for name, p in named}
        self.trained = [name for name, p in named if p.requires_grad]
        self._alike: set[str] = set()  # tensors of a state that belong to a weight that is cut, and are whole

    def name(self, key: str) -> str | None:
        """The weight to which a tensor of a state (see `stage_state`) belongs, if it is cut; else None."""
        kind, _, rest = key.partition("/")
        if kind == "weight":
            name = rest
        elif kind == "optimizer":
            name = self.trained[int(rest.partition("/")[0])]
        elif kind in ("method", "version", "grad") or (kind == "flight" and rest.split("/")[1] == "used"):
            name = self.trained[int(rest.rpartition("/")[2])]
        else:
            return None
        return name if name in self.cuts else None

    def whole(self, tensors: Mapping[str, Tensor], keep: Callable[[str], bool] = lambda key: True) -> dict[str, Tensor]:
        """A stage's state with whole tensors in place of shards; every rank of the group calls it.

        keep: whether this rank wants a tensor, by name.
        """
        found = {}
        for key, tensor in tensors.items():
            name = self.name(key)
            if name is not None and tuple(tensor.shape) == self.shapes[name] and key not in self._alike:
                shards = self.group.collect(tensor)
                tensor = self.cuts[name].whole(shards) if keep(key) else tensor
            if keep(key):
                found[key] = tensor
        return found

    def keep_whole(self, key: str) -> None:
        """Note that every rank has this tensor of a state whole, though it may have the shape of a shard."""
        self._alike.add(key)

    @property
    def count(self) -> int:
        """How many ranks compute the stage."""
        return self.group.count

    def state(self, tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A stage's state from all ranks, which call it alike: whole tensors, and each rank's own if they are in flight
        and spread. The plain values have "ranks" then, since the state goes on with as many only.
        """
        found = self.whole(tensors)
        graphs = flights.in_graphs(plain)
        own = flights.apart(
            {k: v for k, v in found.items() if k.startswith(flights.IN_FLIGHT) and self.name(k) is None}, self.group
        )
        plain = flights.numbered(plain, 0)
        if own or (graphs and self.cuts):
            plain["ranks"] = self.count
        missing = {key.split("/", 2)[2] for key in own}
        return {**{k: v for k, v in found.items() if k not in missing}, **own}, plain

    def own(self, plain: dict[str, Any]) -> dict[str, Any]:
        """The plain values of a state of which each rank keeps its shards: it goes on with as many ranks only."""
        return flights.numbered({**plain, "shards": self.count, "ranks": self.count}, 0)

    def going_on(self, plain: dict[str, Any]) -> dict[str, Any]:
        """The plain values of a state, for this stage to go on from."""
        return flights.numbered(plain, self.group.number)

    def shards(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's shards of a whole state, which are cut on access."""
        return _Shards(self, tensors)

    def shard(self, key: str, tensor: Tensor) -> Tensor:
        """This rank's shard of a tensor of a whole state."""
        name, count = self.name(key), self.group.count
        if name is None or key in self._alike:
            return tensor
        cut = self.cuts[name]
        fits = tensor.dim() == len(self.shapes[name]) and cut.shape(tensor.shape, count) == self.shapes[name]
        return cut.shard(tensor, self.group.index, count) if fits else tensor

    def norm(self, grads: Sequence[Tensor | None], *, computing: bool = False) -> Tensor:
        """The Euclidean norm of the whole gradient: squares of shards are summed over the ranks, others count once.

        computing: whether it is asked for among forwards and backwards; a store makes updates in a thread of its own.
        """
        apart = torch.zeros((), dtype=torch.float64, device="cpu")
        alike = torch.zeros((), dtype=torch.float64, device="cpu")
        for name, g in zip(self.trained, grads, strict=True):
            if g is not None:
                square = torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).double().square().cpu()
                if name in self.cuts:
                    apart += square
                else:
                    alike += square
        with self.group.together() if computing else nullcontext():
            every = (self.group.gather if computing else self.group.collect)(apart.view(1))
        return (torch.stack(every).sum() + alike).sqrt()


class _Shards(Mapping[str, Tensor]):
    def __init__(self, sharding: Sharding, whole: Mapping[str, Tensor]) -> None:
        self._sharding, self._whole = sharding, whole

    def __getitem__(self, key: str) -> Tensor:
        own = f"shard/{self._sharding.group.index}/{key}"
        return self._whole[own] if own in self._whole else self._sharding.shard(key, self._whole[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)
