"""Joined homes: the weights of stages that run as one and live in a store, one stage after the other.

    in the store    │ stage 3: w b │ stage 4: w b │ stage 5: w b │      one copy moves all of them
    on the device   │ stage 3: w b │ stage 4: w b │ stage 5: w b │      a row of w is the w of a stage

Each stage has a part of both, which it uses as it would use memory of its own. The rows of a weight lie as far from
each other as the parts do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.stages.stage import Stage
from pipeback.tensors.flat_buffer import FlatBuffer


class JoinedHomes:
    """The homes of `stages`, which are alike and live in a store. rows: their weights on the device, (n, …) each; of
    one stage alone, without the dimension of the rows.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        flats, slots = [], []
        for stage in stages:
            assert stage.home.flat is not None and stage.home.slot is not None
            flats.append(stage.home.flat)
            slots.append(stage.home.slot)
        count, memory = len(stages), flats[0].memory
        self.count = count
        likes = [view for flat in flats for view in flat.views]
        self.home = FlatBuffer.like(likes, memory.device, pinned=memory.is_pinned())
        self.place = FlatBuffer.like(likes, slots[0].device)
        with torch.no_grad():
            for view, value in zip(self.home.views, likes, strict=True):
                view.copy_(value)
        each, size = len(self.place.views) // count, self.place.nbytes // count
        first = self.place.views[:each]
        self.rows = first if count == 1 else [_rows(view, count, size) for view in first]
        homes, places = self.home.divided(count), self.place.divided(count)
        for stage, slot, flat, place in zip(stages, slots, homes, places, strict=True):
            slot.move(place, flat.views)
            stage.home.join(self, flat)
            stage.home.attach(stage.weights)
            stage.home.look(stage.module)

    def bring(self) -> int:
        """Copy the weights of all stages to the device, where they have memory; return the bytes."""
        self.place.memory.copy_(self.home.memory, non_blocking=True)
        return self.place.nbytes


def _rows(first: Tensor, count: int, apart: int) -> Tensor:
    """Return as (n, …) what lies `apart` bytes from each other, beginning with the `first`."""
    return first.as_strided((count, *first.shape), (apart // first.element_size(), *first.stride()))
