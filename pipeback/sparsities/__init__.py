"""Policies of sparse training: one per file, and by name those of other packages, too (group `pipeback.sparsities`).

Floor 2. A policy imports base, masks and densities, and nothing else of pipeback.
"""

from __future__ import annotations

import inspect
from typing import Any

from pipeback.plugins import Plugins
from pipeback.sparsities.base import Sparsity

__all__ = ["available", "create", "options"]

GROUP = "pipeback.sparsities"

_SPARSITIES = Plugins(
    "sparsity",
    GROUP,
    {
        "magnitude": "magnitude:Magnitude",
        "gradual": "gradual:Gradual",
        "set": "set:SparseEvolution",
        "rigl": "rigl:RigL",
    },
)


def available() -> list[str]:
    """Names that `create` takes; ours first, then those of other packages."""
    return _SPARSITIES.available()


def create(name: str, **options: Any) -> Sparsity:
    """Build a policy: `create("rigl", until=25000, density=0.1)`.

    Raises ValueError for an unknown name or option and suggests the nearest.
    """
    policy: Sparsity = _SPARSITIES.create(name, Sparsity, options)
    return policy


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options that `create(name)` takes, by name, with their defaults."""
    return _SPARSITIES.options(name)


def derived(name: str, updates: int) -> dict[str, Any]:
    """Values for options that `name` needs and does not have by itself, for a training of so many updates in all."""
    return _SPARSITIES.derived(name, updates)
