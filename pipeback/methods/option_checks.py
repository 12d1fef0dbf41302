"""Checks of the options of methods."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch


def check_number(method: str, name: str, value: Any, *, above: bool = False) -> None:
    """Raise a ValueError unless the value is a finite number of at least 0; `above`: above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (above and not value):
        raise ValueError(f"{method}: {name} must be a number {'above 0' if above else 'of at least 0'}, not {value!r}")


def check_share(method: str, name: str, value: Any) -> None:
    """Raise a ValueError unless the value is a number of at least 0 and below 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{method}: {name} must be a number of at least 0 and below 1, not {value!r}")


def require_real(optimizer: torch.optim.Optimizer, method: str) -> None:
    """Raise a ValueError if the optimizer has complex weights, where the method squares their entries as real ones."""
    if any(w.is_complex() for group in optimizer.param_groups for w in group["params"]):
        raise ValueError(
            f"{method} squares real numbers, but {type(optimizer).__name__} has complex weights; keep "
            "torch.view_as_real(weight) as the parameter, and compute with torch.view_as_complex of it, or use "
            'method="pb"'
        )


def require_dense(optimizer: torch.optim.Optimizer, method: str) -> None:
    """Raise a ValueError if the optimizer takes sparse gradients alone, where the method makes them dense."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{method} hands dense gradients to the optimizer, but {type(optimizer).__name__} steps sparse ones only; "
            'take torch.optim.Adam, or use method="staleness_lr"'
        )
