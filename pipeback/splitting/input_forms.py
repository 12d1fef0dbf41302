"""Input forms: which script of a stage a micro-batch takes: that of the form of what the stage receives.

A key is the form: (training, (setting, autocast), (shape, type), …). Where a size depends on values, as that of h[mask]
does, a stage takes any: its shape then has None in all places. A forward that reads such a size is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipeback.tensors import accelerators

Key = tuple[Any, ...]
T = TypeVar("T")


def key_of(parts: Sequence[Tensor], training: bool, setting: int) -> Key:
    """Return a key: micro-batches with different keys need different scripts. setting: see `AttributeReads.number`.

    Autocast is part of it, since it decides the types of what crosses the stage boundaries.
    """
    return (training, (setting, accelerators.casting()), *[(part.shape, part.dtype) for part in parts])


def loosened(form: tuple[torch.Size, torch.dtype]) -> tuple[Any, torch.dtype]:
    """Return the form of a tensor whose size depends on values."""
    return (None,) * len(form[0]), form[1]


def written(key: Key) -> str:
    """Return a key as messages show it."""
    training, (_, around), *parts = key
    shapes = ", ".join(f"{_shape(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in parts)
    cast = "".join(f" under autocast to {str(dtype).removeprefix('torch.')}" for _, dtype in around)
    return f"{shapes} in {'training' if training else 'evaluation'}{cast}"


def _shape(shape: Sequence[int | None]) -> str:
    return str(tuple(shape)).replace("None", "?")


class ByForm(Generic[T]):
    """What a stage has for each form."""

    def __init__(self) -> None:
        self._exact: dict[Key, T] = {}
        self._loose: dict[Key, T] = {}

    def __iter__(self) -> Iterator[Key]:
        yield from self._exact
        yield from self._loose

    def values(self) -> Iterator[T]:
        yield from self._exact.values()
        yield from self._loose.values()

    def get(self, key: Key) -> T | None:
        """Return what there is for the key of a micro-batch."""
        found = self._exact.get(key)
        if found is None and self._loose:
            found = next((each for known, each in self._loose.items() if _fit(known, key)), None)
        return found

    def alike(self, key: Key) -> Iterator[T]:
        """Yield what there is for all forms that a micro-batch of this form may have, too."""
        if not _is_loose(key) and not self._loose:
            if key in self._exact:
                yield self._exact[key]
            return
        for known, each in (*self._exact.items(), *self._loose.items()):
            if _fit(known, key):
                yield each

    def add(self, key: Key, value: T) -> None:
        (self._loose if _is_loose(key) else self._exact)[key] = value


def _is_loose(key: Key) -> bool:
    return any(None in shape for shape, _ in key[2:])


def _fit(a: Key, b: Key) -> bool:
    """Whether one micro-batch may have both forms."""
    return (
        a[:2] == b[:2]
        and len(a) == len(b)
        and all(
            t == u and len(s) == len(r) and all(x is None or y is None or x == y for x, y in zip(s, r, strict=True))
            for (s, t), (r, u) in zip(a[2:], b[2:], strict=True)
        )
    )
