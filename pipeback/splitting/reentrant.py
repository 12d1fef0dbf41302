"""Reentrant: torch.utils.checkpoint with use_reentrant=True, which runs its function without a graph, and later again.

A trace looks into the function; activations= recomputes in stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity

__all__ = ["CheckpointFunction", "checkpointed"]


def checkpointed(args: Sequence[Any]) -> Any:
    """Return what the function gives that `CheckpointFunction` is applied to: (function, whether it draws, its args).

    No gradient reaches the weights in it if no argument needs one. torch warns of that, and so does this.
    """
    function, _, *given = args
    check_backward_validity(given)
    grows = any(isinstance(x, Tensor) and x.requires_grad for x in given)
    with nullcontext() if grows else torch.no_grad():
        return function(*given)
