"""Random stream: each stage draws random numbers from a stream of its own, undisturbed by other threads that draw.

torch has one default generator per process. A thread that borrowed it would disturb others that draw at the same time,
such as a DataLoader in the caller's thread. So if stages run in threads of their own, every operation that draws gets
the stage's generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeback.private import TorchDispatchMode

drawing = threading.RLock()  # the default generator is one per process; whoever draws from it has it to itself

_borrowed = threading.Lock()  # the default generator, for an operation that takes no other
_takes: dict[Any, bool | None] = {}  # whether an operation that draws takes a generator; None: it does not draw


class OwnRandomStream(TorchDispatchMode):
    """Operations of this thread draw from `generator`; the numbers are those of a default generator in its state."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


class StageStream:
    """The random stream of stage `index`; `state` is its generator state, or None while the stage draws nothing.

    threaded: others may draw from the default generator while this stage does.
    """

    def __init__(self, index: int, replica: int) -> None:
        self.index, self.replica, self.seed = index, replica, 0
        self.state: Tensor | None = None
        self.threaded = False

    def begin(self, generator: torch.Generator) -> None:
        """Start the stream. It depends on (seed, stage, replica) alone, not on the process that holds the stage."""
        if self.state is None:
            seed = (self.seed * 1_000_003 + self.index + self.replica * 998_244_353) % 2**63
            self.state = torch.Generator(generator.device).manual_seed(seed).get_state()

    def sow(self, seed: int) -> None:
        """The seed of the whole pipeline."""
        self.seed = seed

    def share(self, threaded: bool) -> None:
        """Set whether other threads may draw at the same time."""
        self.threaded = threaded

    def go_to(self, state: Tensor | None) -> None:
        """Set the state of the stream."""
        self.state = state

    @contextmanager
    def at(self, state: Tensor | None) -> Iterator[None]:
        """A context within which the stream starts from `state`; afterwards it goes on from where it stood before."""
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def run(self, generator: torch.Generator, what: Callable[[], Any], *, modes: bool) -> Any:
        """Return `what()`, which draws from this stream.

        generator: that of the stage's device. modes: whether a dispatch mode may be used; torch.compile does not
        compile code within one.
        """
        assert self.state is not None
        if self.threaded and generator.device.type == "cpu" and modes:
            own = torch.Generator()
            own.set_state(self.state)
            with OwnRandomStream(own):
                found = what()
            self.state = own.get_state()
            return found
        with drawing:
            outside = generator.get_state()
            generator.set_state(self.state)
            try:
                found = what()
                self.state = generator.get_state()  # so that an operation that fails has drawn nothing
                return found
            finally:
                generator.set_state(outside)
