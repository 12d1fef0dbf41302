"""Named classes: how a saved state names the classes of the objects that stand in micro-batches.

No code runs when a state is read: a class is looked for among those that are imported, and objects of it are made
without a call of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

SIMPLE = (str, int, float, bool, type(None))
Context = tuple[type, tuple[str, ...], tuple[Any, ...] | None]  # a class, attributes, keys


def dumped(context: Context) -> list[Any]:
    """Return what an object is apart from its values, as JSON has it. Raises ValueError if its class has no name."""
    kind, names, keys = context
    where = [kind.__module__, kind.__qualname__]
    if found(*where) is not kind:
        raise ValueError(
            f"a micro-batch has a {kind.__name__} in it, which a saved state cannot hold, since its class is not found "
            f"as {'.'.join(where)}; define it at the top of a module, or push a dictionary of tensors"
        )
    if odd := [key for key in keys or () if not isinstance(key, SIMPLE)]:
        raise ValueError(
            f"a micro-batch has a {kind.__name__} in it, which a saved state cannot hold, since one of its keys is a "
            f"{type(odd[0]).__name__}; use strings"
        )
    return [*where, list(names), None if keys is None else list(keys)]


def loaded(plain: Sequence[Any], allowed: Callable[[type], bool]) -> Context:
    """Return what `dumped` was given. Raises ValueError for a class that is not here, or is not `allowed`."""
    module, name, names, keys = plain
    kind = found(module, name)
    if kind is None or not allowed(kind) or hasattr(kind, "__del__"):
        raise ValueError(
            f"a micro-batch of the state has a {name} in it, but no such class was imported from {module}; "
            f"import {module} before the state is loaded"
        )
    return kind, tuple(names), None if keys is None else tuple(keys)


def found(module: str, name: str) -> type | None:
    """Return the class of this name in a module that is imported; None if there is none."""
    value: Any = sys.modules.get(module)
    for step in name.split("."):
        value = getattr(value, step, None)
    return value if isinstance(value, type) else None
