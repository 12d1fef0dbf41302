"""Joined homes: the weights of stages that run as one and live in a store, one stage after the other.

    in the store    │ stage 3: w b │ stage 4: w b │ stage 5: w b │      one copy moves all of them
    on the device   │ stage 3: w b │ stage 4: w b │ stage 5: w b │      a row of w is the w of a stage

Each stage has a part of both, which it uses as it would use memory of its own. The rows of a weight lie as far from
each other as the parts do. A store that has a file per stage, or slices of the stages, keeps them apart: they are
joined on the device alone, and each comes by a copy of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.stages.moving_weights import moving
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
        count, alike = len(stages), slots[0].flat
        self.count = count
        self.place = FlatBuffer.repeated(alike.views, count, slots[0].device, least=alike.nbytes)
        first = self.place.views[: len(alike.views)]
        self.rows = first if count == 1 else [_rows(view, count, alike.nbytes) for view in first]
        self._home = None if stages[0].home.apart else _together(flats)
        homes = flats if self._home is None else self._home.divided(count)
        with moving(stages):
            for stage, slot, flat, place in zip(stages, slots, homes, self.place.divided(count), strict=True):
                slot.move(place, flat.views)
                stage.home.join(self, flat)
                if self._home is not None:
                    stage.home.attach(stage.weights)
                stage.home.look(stage.module)

    def bring(self) -> int | None:
        """Copy the weights of all stages to the device, where they have memory, and return the bytes; None: the store
        keeps them apart, and nothing was copied.
        """
        if self._home is None:
            return None
        self.place.memory.copy_(self._home.memory, non_blocking=True)
        return self.place.nbytes


def _together(flats: Sequence[FlatBuffer]) -> FlatBuffer:
    """Return memory of the store with the values of all these, one after the other."""
    first = flats[0]
    found = FlatBuffer.repeated(first.views, len(flats), first.memory.device, pinned=first.memory.is_pinned())
    with torch.no_grad():
        for view, value in zip(found.views, (view for flat in flats for view in flat.views), strict=True):
            view.copy_(value)
    return found


def _rows(first: Tensor, count: int, apart: int) -> Tensor:
    """Return as (n, …) what lies `apart` bytes from each other, beginning with the `first`."""
    return first.as_strided((count, *first.shape), (apart // first.element_size(), *first.stride()))
