"""Sparse weights: keeps the survivors of a stage's weights, and converts them to the dense form on the device.

In the store a sparse weight is the vector of its surviving values, with a packed index of where they belong; the
optimizer and the method see that vector. On the device it is dense, with zeros elsewhere, and no mask is in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from pipeback.sparsities.base import At, Sparsity
from pipeback.stages.joint_optimizer import separable
from pipeback.stages.stage import Stage
from pipeback.streaming.sparse_index import gather, header, pack, scatter, unpack, unpack_mask
from pipeback.streaming.sparse_linear import SparseLinear, gain
from pipeback.tensors.flat_buffer import FlatBuffer

GAIN = 1.1  # zeros are skipped if that is faster by this factor
Packed = tuple[Tensor | None, ...]  # an index for each trainable weight; None: it is dense


class SparseWeights:
    """The index of the surviving weights of a stage, now and in the older versions that are still needed."""

    def __init__(
        self, policy: Sparsity, numbers: Sequence[int], densities: Sequence[float], at: At, skip: bool | str
    ) -> None:
        """numbers: the sparsified ones among the stage's trainable weights, with their densities.

        skip: whether linear layers skip their zeros; "auto": those for which this was measured to be faster.
        """
        self.skip = skip
        self.policy, self.numbers, self.densities, self.at = policy, list(numbers), list(densities), at
        self.changes: list[tuple[int, Packed]] = []  # (from this version on, index), oldest first

    @property
    def packed(self) -> Packed:
        """The index of the newest weights, per trainable weight."""
        return self.changes[-1][1]

    def packed_at(self, version: int) -> Packed:
        """Return the index of the weights after `version` updates."""
        return next(packed for since, packed in reversed(self.changes) if since <= version)

    def begin(self, weights: Sequence[Tensor], where: torch.device) -> None:
        """Choose the first survivors among dense weights. where: the device on which they and the index will live."""
        masks = self.policy.masks([weights[n] for n in self.numbers], self.densities, self.at)
        self.changes = [(0, self._packed(len(weights), [mask.to(where) for mask in masks]))]

    def gathered(self, dense: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the survivors of tensors, on the devices of these; those of dense weights are returned unchanged."""
        return [
            t if t is None or index is None else gather(t, unpack(index.to(t.device)))
            for t, index in zip(dense, self.packed, strict=True)
        ]

    def skipping(self, stage: Stage, device: torch.device) -> dict[int, SparseLinear]:
        """Return the linear layers that skip their zeros, by the number of their weight."""
        if self.skip is False:
            return {}
        layers = {id(m.weight): m for m in stage.module.modules() if type(m) is nn.Linear}
        found = {}
        for n, density in zip(self.numbers, self.densities, strict=True):
            p = stage.params[n]
            if id(p) in layers and (self.skip is True or gain(p.shape, density, p.dtype, device) > GAIN):
                found[n] = SparseLinear(layers[id(p)], lambda: self.policy.dense_gradient(stage.version + 1))
        return found

    def cut_state(self, stage: Stage) -> None:
        """Cut the initial state of an optimizer, such as Adagrad's, to the survivors."""
        for n in self.numbers:
            state, index = stage.optimizer.state.get(stage.weights[n], {}), self.packed[n]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == stage.params[n].shape and index is not None:
                    state[key] = gather(value, unpack(index))

    def dense(self, stage: Stage) -> list[Tensor]:
        """Return all parameters of the stage in their dense form, with zeros where no weight survives."""
        assert stage.home.flat is not None and stage.home.slot is not None
        indices, found = iter(self.packed), []
        for p, view in zip(stage.home.slot.params, stage.home.flat.views, strict=True):
            index = next(indices) if p.requires_grad else None
            like = view if index is None else scatter(view, unpack(index), view.new_empty(p.shape))
            found.append(like)
        return found

    def expanded(self, stage: Stage, n: int, value: Tensor) -> Tensor:
        """Return the dense form of a tensor with one value per survivor of weight n."""
        index = self.packed[n]
        if index is None:
            return value
        return scatter(value, unpack(index.to(value.device)), value.new_empty(stage.params[n].shape))

    def gather_into(self, stage: Stage, dense: Sequence[Tensor]) -> None:
        """Copy the survivors of tensors from `dense`, which the caller has changed, to the weights."""
        assert stage.home.flat is not None and stage.home.slot is not None
        indices = iter(self.packed)
        for p, view, value in zip(stage.home.slot.params, stage.home.flat.views, dense, strict=True):
            index = next(indices) if p.requires_grad else None
            if index is not None:
                view.copy_(gather(value, unpack(index)))

    @property
    def index_bytes(self) -> int:
        """The bytes of the index that travels with the survivors."""
        return sum(index.numel() for index in self.packed if index is not None)

    def change(self, stage: Stage, gradients: Sequence[Tensor | None], update: int) -> None:
        """Choose other survivors after an update, if a change is due.

        Survivors that stay keep their values and optimizer state; new ones begin at zero. gradients: dense ones, if the
        policy needs them. Older indices that no version needs are dropped.
        """
        old, weights = self.packed, stage.weights
        places = [unpack(index) if index is not None else None for index in old]
        dense = [self._dense(weights[n], places[n], old[n]) for n in self.numbers]
        masks = [unpack_mask(index).view(-1) for index in old if index is not None]
        given = [None if (g := gradients[n]) is None else g.reshape(-1) for n in self.numbers]
        at = self.at._replace(update=update)
        new = self._packed(len(weights), self.policy.change(dense, masks, given, self.densities, at))

        def moved(n: int, value: Tensor) -> Tensor:
            index, place = new[n], places[n]
            assert index is not None and place is not None
            return gather(self._dense(value, place, old[n]), unpack(index))

        values = [moved(n, w.data) if n in self.numbers else w.data for n, w in enumerate(weights)]
        fresh: dict[int, Tensor] = {}  # by the identity of the tensor it replaces, which a method may also hold
        for n in self.numbers:
            w, state = weights[n], stage.optimizer.state.get(weights[n], {})
            kept = [some[n] for some in stage.state.values() if isinstance(some, list)]
            for value in (*state.values(), *kept):
                if isinstance(value, Tensor) and value.shape == w.shape and id(value) not in fresh:
                    fresh[id(value)] = moved(n, value)
            if state:  # a new dictionary, by which a joint optimizer notices the change
                stage.optimizer.state[w] = {key: fresh.get(id(value), value) for key, value in state.items()}
        stage.put_state(
            {
                key: [fresh.get(id(x), x) for x in some] if isinstance(some, list) else some
                for key, some in stage.state.items()
            }
        )
        _rehome(stage, values)
        needed = [update, *stage.versions.kept, *(flight.version for flight in stage.flights.values())]
        oldest = next((k for k in reversed(range(len(self.changes))) if self.changes[k][0] <= min(needed)), 0)
        self.changes = [*self.changes[oldest:], (update, new)]

    def restore(self, stage: Stage, changes: Sequence[tuple[int, Packed]]) -> None:
        """Restore saved indices, and give the stage's weights room for their survivors."""
        assert stage.home.flat is not None
        where = stage.home.flat.memory.device
        self.changes = [(since, tuple(None if p is None else p.to(where) for p in packed)) for since, packed in changes]
        pairs = zip(stage.weights, self.packed, strict=True)
        _rehome(stage, [w.data if index is None else w.new_empty(header(index)[2]) for w, index in pairs])

    def _packed(self, count: int, masks: Sequence[Tensor]) -> Packed:
        indices: list[Tensor | None] = [None] * count
        for n, mask in zip(self.numbers, masks, strict=True):
            indices[n] = pack(mask.reshape(-1))
        return tuple(indices)

    @staticmethod
    def _dense(values: Tensor, place: Tensor | None, index: Tensor | None) -> Tensor:
        assert place is not None and index is not None
        return scatter(values.detach(), place, values.new_empty(header(index).size))


def _rehome(stage: Stage, values: Sequence[Tensor]) -> None:
    """Give the stage's weights these values, in a home of the size that they need."""
    assert stage.home.flat is not None and stage.home.slot is not None
    given = iter(values)
    pairs = zip(stage.home.slot.params, stage.home.flat.views, strict=True)
    likes = [next(given) if p.requires_grad else view for p, view in pairs]
    memory = stage.home.flat.memory
    stage.home.refill(FlatBuffer.like(likes, memory.device, pinned=memory.is_pinned()))
    for view, value in zip(stage.home.flat.views, likes, strict=True):
        view.copy_(value)
    stage.home.attach(stage.weights)


def choose(policy: Sparsity, stages: Sequence[Stage], skip: bool | str = False) -> list[SparseWeights | None]:
    """Return the sparse weights of each stage, with densities that are distributed over the whole model.

    Raises ValueError if there is nothing to sparsify, if a pattern of `exclude` names no parameter, and if an optimizer
    uses whole matrices.
    """
    chosen: list[list[int]] = []
    shapes, names = [], []
    for stage in stages:
        mine = []
        owners = {id(p): owner for owner in stage.module.modules() for p in owner.parameters(recurse=False)}
        numbers = {id(p): n for n, p in enumerate(stage.params)}
        for name, p in stage.module.named_parameters():
            names.append(stage.names[name])
            if id(p) in numbers and policy.chooses(owners[id(p)], names[-1], p):
                mine.append(numbers[id(p)])
                shapes.append(p.shape)
        chosen.append(mine)
        if mine and not separable(stage.optimizer):
            raise ValueError(
                f"sparsity: {type(stage.optimizer).__name__} of {stage.label} may look at whole matrices, of which "
                "only the survivors are kept; use one of torch.optim's elementwise ones, such as SGD or AdamW"
            )
    for pattern in policy.exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"sparsity: exclude={pattern!r} names no parameter; there are {', '.join(names[:4])}, …")
    if not shapes:
        raise ValueError(
            "sparsity: no parameter is sparsified: it takes trainable ones of two dimensions or more, but those that "
            "exclude= names; leave sparsity out, or exclude fewer"
        )
    densities = iter(policy.densities(shapes))
    return [
        SparseWeights(policy, mine, [next(densities) for _ in mine], At(stage.random.seed, stage.index), skip)
        if mine
        else None
        for stage, mine in zip(stages, chosen, strict=True)
    ]
