"""Device slot: the place on the device where the weights of a streamed stage lie while they are in use.

A graph in flight refers to the slot's storage, not to its contents: the memory is freed and reallocated between F (the
forward) and B (the backward), and B reads the weights that were fetched for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.tensors.flat_buffer import FlatBuffer


class DeviceSlot:
    """Device memory of one stage's parameters, which are either on the device or at rest.

    rest: what the parameters show while they are not on the device: the weights of a store in host memory, or NaN.
    least: bytes of memory, should there be more than the parameters need.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], device: torch.device, rest: Sequence[Tensor] | None, least: int = 0
    ) -> None:
        self.params, self.device = list(params), device
        self.flat = FlatBuffer.like([p.data for p in params], device, least=least)
        self.shows = rest is not None  # whether the parameters at rest are the weights in the store
        self.rest = [nan(p, device) for p in params] if rest is None else list(rest)
        self.content: int | None = None  # the version of the weights there; None: shifted weights, or nothing
        self.vacant = True  # whether nothing was copied there
        self._moving = Lock()  # a worker may move parameters while the caller of a push looks where they are
        self._versions: list[int] | None = None  # counts of writes into the parameters when they came to rest as NaN
        self._written = False  # whether somebody has written into that NaN since
        self.skipping: dict[int, Any] = {}  # by number among the trainable ones: weights whose zeros are skipped
        self.leave()

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def move(self, flat: FlatBuffer, rest: Sequence[Tensor]) -> None:
        """Use other memory on the device; nothing may be there. rest: as before, where the parameters show weights."""
        self.leave()
        self.flat, self.rest = flat, list(rest) if self.shows else self.rest
        self.leave()

    def arrive(self) -> None:
        """Allocate memory, for weights that are to be copied there."""
        with self._moving:
            self.leave_rest()
            self.flat.fill()
            self._lay(self.flat.views)
        for skipping in self.skipping.values():
            skipping.arrive()

    def came(self, version: int | None) -> None:
        """Note that weights of this version were copied there; None: shifted ones."""
        self.content, self.vacant = version, False

    def leave(self) -> None:
        """Free the memory; its contents need no copy back, since they are never changed there."""
        with self._moving:
            self.leave_rest()
            self._lay(self.rest)
            for skipping in self.skipping.values():
                skipping.leave()
            self.flat.empty()
            self.come_to_rest()
        self.content, self.vacant = None, True

    @contextmanager
    def showing(self, values: Sequence[Tensor]) -> Iterator[None]:
        """A context within which the parameters show these values, also after weights have come and left."""
        self.leave_rest()
        before, self.rest, shows, self.shows = self.rest, list(values), self.shows, True
        self._lay(self.rest)
        try:
            yield
        finally:
            self.rest, self.shows = before, shows
            self._lay(self.flat.views if self.flat.here else self.rest)
            self.come_to_rest()

    def come_to_rest(self) -> None:
        """Note how often parameters were written that are NaN from now on."""
        self._versions = None if self.shows or self.flat.here else [p._version for p in self.params]

    def leave_rest(self) -> None:
        """Note whether somebody has written into them meanwhile."""
        if self._versions is not None:
            self._written |= self._versions != [p._version for p in self.params]
            self._versions = None

    def written(self) -> bool:
        """Whether somebody has written into parameters that are NaN at rest, which is lost; told once."""
        with self._moving:
            resting = self._versions is not None
            self.leave_rest()
            found, self._written = self._written, False
            if resting and found:
                self.rest = [nan(p, self.device) for p in self.params]
                self._lay(self.rest)
            if resting:
                self.come_to_rest()
        return found

    def _lay(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.params, values, strict=True):
            p.data = value

    def intact(self) -> bool:
        """Whether every parameter is where the slot has put it."""
        with self._moving:
            places = self.flat.views if self.flat.here else self.rest
            return all(p.data_ptr() == place.data_ptr() for p, place in zip(self.params, places, strict=True))


def nan(p: Tensor, device: torch.device) -> Tensor:
    """NaN in the shape of a tensor, so that a reader notices that its values are not here."""
    value = float("nan") if p.is_floating_point() or p.is_complex() else 0
    return torch.full((1,) * p.dim(), value, dtype=p.dtype, device=device).expand(p.shape)
