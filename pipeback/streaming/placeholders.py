"""Placeholders: what tensors show whose memory is freed, since torch would read and write at an address without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pipeback.private import identity
from pipeback.stages.device_slot import nan


class Placeholders:
    """NaN in an optimizer's weights and state, which its user may read or write, while they are in a file."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by storage of the NaN: tensor, its own memory, NaN

    def put(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Put NaN in place of these tensors, by the name of what frees them."""
        self._names = set(tensors)
        for tensor in (t for some in tensors.values() for t in some):
            own, shown = tensor.data, nan(tensor, tensor.device)
            tensor.data = shown
            self._held[identity(shown)] = tensor, own, shown

    def take(self) -> None:
        """Give all tensors their own memory again, unless somebody has given them another."""
        for tensor, own, shown in self._held.values():
            if identity(tensor) == identity(shown):
                tensor.data = own
        self._held, self._names = {}, set()

    def behind(self, tensor: Tensor) -> Tensor:
        """The tensor with its own memory, which may be freed."""
        held = self._held.get(identity(tensor))
        return tensor if held is None else held[1]

    def __contains__(self, name: str) -> bool:
        return name in self._names
