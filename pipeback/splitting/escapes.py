"""Escapes: tensors that leave a module by another way than what it returns.

A hook on a layer within a block collects attention weights or router logits for the model's output; a block puts what
it has found into a list of its model. Where a block is one call, nobody sees such a tensor come. So it is looked into:
what it calls is one call each, until the tensor is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from pipeback.tensors.structures import parts

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Escape(ValueError):
    """A tensor that was made within the module of this path has come out of it by another way."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class Inside:
    """Tensors that were made within modules that are not looked into, while they live."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def note(self, output: Any, path: str) -> None:
        """A torch function has given this within the module of that path."""
        for x in (output,) if isinstance(output, Tensor) else parts(output):
            if isinstance(x, Tensor):
                self._made[id(x)] = weakref.ref(x), path

    def where(self, tensor: Tensor) -> str | None:
        """The path of the module that it was made in; None if in none."""
        found = self._made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


def looked_into(follow: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Follow once more, and look into the module that a tensor has escaped from, and into others of its class.

    Their paths go into self.opened; those in self.whole stay whole.
    """

    @wraps(follow)
    def followed(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        opened, whole = self.opened, self.whole  # type: ignore[attr-defined]
        while True:
            try:
                return follow(self, *args, **kwargs)
            except Escape as escape:
                if escape.path in opened or escape.path in whole:
                    raise
                paths = dict(self.model.named_modules())  # type: ignore[attr-defined]
                kind = type(paths[escape.path])
                opened.update(path for path, m in paths.items() if type(m) is kind and path not in whole)

    return followed
