"""Input gradients: none goes back to what is pushed, so that a module in front of the pipeline would not train."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeback.tensors.structures import parts


def check_unwanted(x: Any, y: Any) -> None:
    """Raise ValueError if a tensor of x or y requires a gradient."""
    for name, value in (("x", x), ("y", y)):
        inside = (value,) if isinstance(value, Tensor) else parts(value)
        if any(isinstance(part, Tensor) and part.requires_grad for part in inside):
            raise ValueError(
                f"a tensor of {name} requires a gradient, but none goes back to {name}: whatever has computed it would "
                f"not train; give {name}.detach(), or make what has computed it a part of the model"
            )
