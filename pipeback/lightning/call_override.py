"""Call override: for a while, a module runs another forward when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeback.private import hook_tables


@contextmanager
def call_instead(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Replace the forward of the module within the context; None stands for that of its class."""
    own = module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward
    try:
        yield
    finally:
        if module.__dict__.get("forward") is forward:  # else it was replaced meanwhile, for good
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """A context within which the module has no hooks: only one of two who call it is to run them."""
    tables = hook_tables(module)
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update({**hooks, **table})


@contextmanager
def by_itself(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """A context within which the module has this forward, and no hooks, which are run by the user's call of it."""
    with without_hooks(module), call_instead(module, forward):
        yield
