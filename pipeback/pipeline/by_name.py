"""By name: a method or sparsity policy whose name is all that a user gives, with what the rest follows from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from pipeback import sparsities
from pipeback.sparsities.base import Sparsity

UPDATES = 4000  # the length of a training that is not known, of which methods and policies take their share

Derived = Callable[[int], dict[str, Any]]  # from updates of the whole training to values of options


def completed(said: str, derived: Derived, updates: int | None, cure: str, **options: Any) -> dict[str, Any]:
    """`options` and the derived ones that are missing; a warning says so if they are a guess.

    said: the option as the user gave it. updates: of the whole training, if it is known. cure: what sets them, with
    {} where they stand.
    """
    missing = derived(UPDATES if updates is None else updates)
    missing = {key: value for key, value in missing.items() if key not in options}
    if updates is None and derived(2 * UPDATES) != derived(UPDATES):
        typed = ", ".join(f"{key}={value!r}" for key, value in missing.items())
        warnings.warn(
            f"{said} is taken with {typed}, which suits a training of {UPDATES} updates; set it by "
            f"{cure.format(typed)}",
            stacklevel=2,
        )
    return {**options, **missing}


def sparsity(given: str | Sparsity | None, updates: Callable[[], int | None] = lambda: None) -> Sparsity | None:
    """The policy as it was given, or the one of this name. updates: of the whole training, if they are known."""
    if not isinstance(given, str):
        return given
    cure = f'store=pipeback.Streaming(sparsity=pipeback.sparsities.create("{given}", {{}}))'
    values = completed(f"sparsity={given!r}", lambda n: sparsities.derived(given, n), updates(), cure)
    return sparsities.create(given, **values)
