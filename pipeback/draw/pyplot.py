"""Matplotlib's pyplot, which only pictures need."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return matplotlib.pyplot. Raises ModuleNotFoundError that says what to install."""
    try:
        from matplotlib import pyplot as found
    except ModuleNotFoundError as error:
        told = f"pictures need {error.name}: pip install 'pipeback[recipes]'"
        raise ModuleNotFoundError(told, name=error.name) from error
    return found
