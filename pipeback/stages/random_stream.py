"""Random numbers of a stage, from its own stream, whoever else draws meanwhile.

torch's default generator is one a process: a thread that borrowed it would disturb whoever draws at the same time, a
DataLoader in the caller's thread, say. So where stages run in threads of their own, every operation that draws is
given the stage's generator.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from pipeback.private import TorchDispatchMode

_borrowed = threading.Lock()  # the default generator, for an operation that takes no other
_takes: dict[Any, bool | None] = {}  # whether an operation that draws takes a generator; None: it does not draw


class OwnRandomStream(TorchDispatchMode):
    """Operations of this thread draw from `generator`; the numbers are those of a default generator in its state."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        takes = _takes[func] if func in _takes else _known(func)
        if takes is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if takes:
            return func(*args, **{**kwargs, "generator": self.generator})
        with _borrowed:
            default = torch.default_generator
            before = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(before)


def _known(func: Any) -> bool | None:
    takes = None
    if torch.Tag.nondeterministic_seeded in func.tags:
        takes = any(argument.name == "generator" for argument in func._schema.arguments)
    _takes[func] = takes
    return takes
