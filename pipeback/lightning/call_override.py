"""Call override: for a while, a module runs another forward when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from pipeback.private import hook_tables


@contextmanager
def call_instead(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Replace the forward of the module within the context; None stands for that of its class."""
    own = module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward  # as setting the attribute does, which takes torch as long as a kernel
    try:
        yield
    finally:
        if module.__dict__.get("forward") is forward:  # else it was replaced meanwhile, for good
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


class Fronts:
    """Forwards that stand in for those of modules until they are taken back."""

    def __init__(self) -> None:
        self._own: dict[nn.Module, Callable[..., Any] | None] = {}  # of each: one that was set by the user

    def put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._own.setdefault(module, module.__dict__.get("forward"))
        module.forward = forward

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context within which all modules run their own forwards."""
        put = {module: module.forward for module in self._own}
        self.back()
        try:
            yield
        finally:
            for module, forward in put.items():
                self.put(module, forward)

    def back(self) -> None:
        """Give all modules their own forwards again."""
        for module, own in self._own.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        self._own.clear()


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


def hooks_now(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the hooks that the module has now."""
    return [dict(table) for table in hook_tables(module)]


@contextmanager
def with_hooks(module: nn.Module, hooks: list[dict[Any, Any]]) -> Iterator[None]:
    """A context within which the module has these hooks, too; it lacks them after that if it did before."""
    lacking = [own.keys() - table.keys() for table, own in zip(hook_tables(module), hooks, strict=True)]
    for table, own in zip(hook_tables(module), hooks, strict=True):
        table.update(own)
    try:
        yield
    finally:
        for table, keys in zip(hook_tables(module), lacking, strict=True):
            for key in keys:
                table.pop(key, None)


def as_it_is(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the module with the forward and the hooks that it has now, whatever it has then."""
    forward, hooks = vars(module).get("forward"), hooks_now(module)

    def called(*args: Any, **kwargs: Any) -> Any:
        with by_itself(module, forward), with_hooks(module, hooks):
            return module(*args, **kwargs)

    return called


def by_itself(module: nn.Module, forward: Callable[..., Any] | None) -> AbstractContextManager[None]:
    """A context within which the module has this forward, and no hooks, which are run by the user's call of it."""
    return _without_hooks(module, forward) if any(hook_tables(module)) else call_instead(module, forward)


@contextmanager
def _without_hooks(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    with without_hooks(module), call_instead(module, forward):
        yield
