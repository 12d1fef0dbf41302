"""Learnt: what the rehearsal finds out about a stage, and a push."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.stages.module_settings import Settings
from pipeback.stages.reach import Reach
from pipeback.tensors import accelerators

Changing = tuple[tuple[dict[str, Tensor | None], str], ...]  # buffers: the table that one is in, and its name there


class Learnt(NamedTuple):
    """What the rehearsal and pushes have found out about a stage; before them, what is safe to assume."""

    mixed: bool = True  # inputs or gradients may come from another device
    alike: tuple[torch.Size, ...] | None = None  # for inputs of these shapes, gradients have the inputs' strides
    clones_input: bool = False  # a module that changes its input in place gets a copy
    control_flow: bool = False  # it calls torch.cond or torch.while_loop
    lends: bool = False  # what it sends on may lie in its weights (`own_memory`)
    changing: Changing = ()  # buffers that forwards change
    activation_bytes: int = 0  # per micro-batch, on the device
    handed_bytes: int = 0  # those of them that the stage before keeps as well, and longer, if it is in this process
    host_bytes: int = 0  # the same in host memory, where that is another place
    settings: Settings | None = None  # modes and numbers of the modules, as the last push found them
    repeat_bytes: int = 0  # what a forward done once more holds beyond that, until its backward is done
    reach: tuple[Reach, ...] = ()  # how far the gradient of each of its outputs goes, if there are several
    frozen: tuple[int, ...] = ()  # the numbers of the weights that the user has frozen, as the last push found them
    casts: accelerators.Autocast = ()  # what its forwards enter by themselves (`own_autocast`)
