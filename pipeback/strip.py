"""Strip: weights of stages, and what goes with them, each in one run of memory, so that a step over many small tensors
is a few operations on one long vector.

Elementwise operations round an element alike wherever it lies, so bits stay what they are (a law of the tests).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.bundle import DECAYED, GRADIENTS, SCRATCH, WEIGHTS, Bundle, Weights, joined
from pipeback.flat import Flat, dense, places
from pipeback.stage import Stage

SMALL = 1 << 16  # bytes of a weight, on average, up to which calls cost more than their arithmetic


class Strip:
    """`likes`: tensors of one dtype on one device. Each of its rooms has a place for something beside each of them."""

    def __init__(self, likes: Sequence[Tensor]) -> None:
        self.likes = list(likes)
        begins, end = places(self.likes)
        size = self.likes[0].element_size()
        self._cuts = [at // size for at in (*begins, end)]
        self._rooms: dict[str, Flat] = {}

    def room(self, name: str, first: int, count: int) -> Bundle:
        """What lies in the room beside `count` weights from that number on."""
        found = Bundle(self._flat(name).views[first : first + count])
        found.lie(self, name, first)
        return found

    def flat(self, name: str, first: int, count: int) -> Tensor:
        """The same as one vector, with the gaps."""
        whole = self._flat(name).memory.view(self.likes[0].dtype)
        return whole[self._cuts[first] : self._cuts[first + count]]

    @property
    def beside(self) -> int:
        """Bytes that no stage counts for its own."""
        return sum(self._rooms[name].nbytes for name in (GRADIENTS, DECAYED) if name in self._rooms)

    def _flat(self, name: str) -> Flat:
        if name not in self._rooms:
            self._rooms[name] = flat = Flat(self.likes, self.likes[0].device)
            flat.memory.zero_()  # the gaps, too: whatever is done to a zero leaves a number
        return self._rooms[name]


@torch.no_grad()
def lay(stages: Sequence[Stage]) -> None:
    """Have the weights of these stages, and their scratch, lie in a strip, if that pays."""
    some = [stage for stage in stages if stage.weights and not stage.keeps_masters and stage.slot is None]
    weights: Weights = [w for stage in some for w in stage.weights]
    if len(weights) < 2 or not _pays(weights) or joined(stage.weights for stage in some).strip is not None:
        return
    strip, at = Strip([w.detach() for w in weights]), 0
    for stage in some:
        n = len(stage.weights)
        for p, place in zip(stage.params, strip.room(WEIGHTS, at, n), strict=True):
            place.copy_(p)
            p.data = place
        stage.moved()
        stage.weights.lie(strip, WEIGHTS, at)
        if stage.scratch is not None:
            stage.scratch = strip.room(SCRATCH, at, n)
        at += n
    strip.likes = [w.detach() for w in strip.room(WEIGHTS, 0, at)]  # the old ones may go


def _pays(weights: Sequence[Tensor]) -> bool:
    kinds = {(w.dtype, w.device.type) for w in weights}
    plain = kinds in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})  # elsewhere foreach is one call, too
    small = sum(w.nbytes for w in weights) <= SMALL * len(weights)
    return plain and small and all(w.stride() == dense(w) and not w.is_shared() for w in weights)
