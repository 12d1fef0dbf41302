"""Checks of the options of methods."""

from __future__ import annotations

from math import isfinite
from typing import Any


def check_number(method: str, name: str, value: Any, *, above: bool = False) -> None:
    """Raise a ValueError unless the value is a finite number of at least 0; `above`: above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (above and not value):
        raise ValueError(f"{method}: {name} must be a number {'above 0' if above else 'of at least 0'}, not {value!r}")


def check_share(method: str, name: str, value: Any) -> None:
    """Raise a ValueError unless the value is a number of at least 0 and below 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{method}: {name} must be a number of at least 0 and below 1, not {value!r}")
