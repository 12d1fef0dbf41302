"""Device slot: the place of a streamed stage on its device. Pool: memory there for a few stages at a time.

A graph in flight refers to the slot's memory, not to what lies there: memory is given away and got anew, and B finds
whatever was brought for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.tensors.flat_buffer import FlatBuffer


class DeviceSlot:
    """Device memory of one stage's parameters, which are there or at rest.

    rest: what the parameters show while they are not on the device: the weights of a store in host memory, or NaN.
    least: bytes of memory, should there be more than the parameters need.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], device: torch.device, rest: Sequence[Tensor] | None, least: int = 0
    ) -> None:
        self.params, self.device = list(params), device
        self.flat = FlatBuffer([p.data for p in params], device, least=least)
        self.shows = rest is not None  # whether the parameters at rest are the weights in the store
        self.rest = [_nan(p, device) for p in params] if rest is None else list(rest)
        self.content: int | None = None  # the version of the weights that lie there; None: others, or nothing
        self.skipping: dict[int, Any] = {}  # by number among the trainable ones: weights whose zeros are skipped
        self.leave()

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def arrive(self) -> None:
        """Memory, for weights that are to be copied there."""
        self.flat.fill()
        for p, view in zip(self.params, self.flat.views, strict=True):
            p.data = view
        for skipping in self.skipping.values():
            skipping.arrive()

    def leave(self) -> None:
        """Give the memory away; what lies there was never changed."""
        for p, value in zip(self.params, self.rest, strict=True):
            p.data = value
        for skipping in self.skipping.values():
            skipping.leave()
        self.flat.empty()
        self.content = None

    @contextmanager
    def showing(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The time in which the parameters show these."""
        before = [p.data for p in self.params]
        for p, value in zip(self.params, values, strict=True):
            p.data = value
        try:
            yield
        finally:
            for p, value in zip(self.params, before, strict=True):
                p.data = value

    def intact(self) -> bool:
        """Whether every parameter is where the slot has put it."""
        places = self.flat.views if self.flat.here else self.rest
        return all(p.data_ptr() == place.data_ptr() for p, place in zip(self.params, places, strict=True))


class Pool:
    """At most `most` stages have memory on the device; `slots` are those, who came first before the others."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.slots: list[DeviceSlot] = []  # that have memory
        self.peak_stages = self.peak_bytes = 0

    def admit(self, slot: DeviceSlot) -> None:
        """Memory for a slot that has none; there must be room."""
        if len(self.slots) >= self.most:
            raise RuntimeError(f"{self.most} stages are on the device, which has room for no more")
        slot.arrive()
        self.slots.append(slot)
        self.peak_stages = max(self.peak_stages, len(self.slots))
        self.peak_bytes = max(self.peak_bytes, sum(other.nbytes for other in self.slots))

    def dismiss(self, slot: DeviceSlot) -> None:
        self.slots.remove(slot)
        slot.leave()


def _nan(p: Tensor, device: torch.device) -> Tensor:
    """Nothing, in the shape of a parameter: whoever reads it sees that there is nothing."""
    value = float("nan") if p.is_floating_point() or p.is_complex() else 0
    return torch.full((1,) * p.dim(), value, dtype=p.dtype, device=device).expand(p.shape)
