"""Escaped tensors: tensors that leave a module otherwise than by its return value.

A hook on a layer within a block may collect attention weights or router logits for the model's output, or a block may
append a tensor to a list of its model. Where a block is recorded as one call, the origin of such a tensor is not seen.
So the block is traced into, level by level, until it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from pipeback.splitting.refusals import Unmade
from pipeback.tensors.structures import PLAIN, parts

NO_TENSORS = {*PLAIN, torch.Size}
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Escape(ValueError):
    """A tensor that was made within the module of this path has left it otherwise than by its return value."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class Inside:
    """Live tensors that were made within modules that are not traced into."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def note(self, output: Any, path: str) -> None:
        """Note the output of a torch function that was called within the module of that path."""
        if type(output) is Tensor:  # the rule
            self._made[id(output)] = weakref.ref(output), path
        elif type(output) not in NO_TENSORS:
            for x in parts(output):
                if isinstance(x, Tensor):
                    self._made[id(x)] = weakref.ref(x), path

    def where(self, tensor: Tensor) -> str | None:
        """Return the path of the module that made a tensor; None if no noted module did."""
        found = self._made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


def looked_into(follow: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wrap a function that traces: if a tensor escapes from a module, trace once more, into that module and its class.

    Paths of such modules are added to self.opened; modules in self.whole are never traced into. If the forward uses a
    tensor of unknown origin, self.deep is set for one more trace, which looks for it where it may have been before.
    """

    @wraps(follow)
    def followed(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        opened, whole = self.opened, self.whole  # type: ignore[attr-defined]
        while True:
            try:
                return follow(self, *args, **kwargs)
            except Unmade:
                if self.deep:  # type: ignore[attr-defined]
                    raise
                self.deep = True  # type: ignore[attr-defined]
            except Escape as escape:
                if escape.path in opened or escape.path in whole:
                    raise
                paths = dict(self.model.named_modules())  # type: ignore[attr-defined]
                kind = type(paths[escape.path])
                opened.update(path for path, m in paths.items() if type(m) is kind and path not in whole)

    return cast(Callable[Concatenate[S, P], R], followed)
