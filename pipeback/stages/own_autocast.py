"""Own autocast: the autocast that the forwards of a stage enter by themselves, where they may run in later calls than
the push that brought their micro-batch, and beside operations that no autocast may reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar

from pipeback.tensors import accelerators

Forward = TypeVar("Forward", bound=Callable[..., Any])


def under_own_autocast(forward: Forward) -> Forward:
    """Let a method of a stage run under the stage's own autocast, if it has one."""

    @wraps(forward)
    def entered(stage: Any, *given: Any, **named: Any) -> Any:
        if not stage.learnt.casts:
            return forward(stage, *given, **named)
        with around(stage):
            return forward(stage, *given, **named)

    return entered  # type: ignore[return-value]


def around(stage: Any) -> AbstractContextManager[None]:
    """A context under a stage's own autocast alone."""
    return accelerators.under(stage.learnt.casts)


@contextmanager
def casting(stages: Sequence[Any], casts: accelerators.Autocast) -> Iterator[None]:
    """A context within which this is the own autocast of these stages."""
    before = [stage.learnt.casts for stage in stages]
    for stage in stages:
        stage.learn(casts=casts)
    try:
        yield
    finally:
        for stage, own in zip(stages, before, strict=True):
            stage.learn(casts=own)
