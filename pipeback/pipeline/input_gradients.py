"""Input gradients: none goes back to what is pushed, so that a module in front of the pipeline would not train."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeback.tensors.structures import parts


def check_unwanted(x: Any) -> None:
    """Raise ValueError if a tensor of x requires a gradient."""
    inside = (x,) if isinstance(x, Tensor) else parts(x)
    if any(isinstance(part, Tensor) and part.requires_grad for part in inside):
        raise ValueError(
            "a tensor of x requires a gradient, but none goes back to x: whatever has computed it would not train; "
            "give x.detach(), or make what has computed it a part of the model"
        )
