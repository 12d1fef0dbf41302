"""Module hooks: what somebody has put around the forwards of modules: hooks, or a forward that is set on the module.

A module that is kept whole is called, with all its hooks. Of a module that is traced into, the hooks around its forward
are traced, too. Those on its gradients would be lost, since nobody calls it: it is kept whole instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from torch import nn

from pipeback.private import hook_tables

Leaves = Callable[[str, nn.Module], bool]


class Around:
    """What is around the forwards of modules, and how many modules each has in it; it is cheap where nothing is."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._seen: set[int] = set()
        self._tables: list[dict[Any, Any]] = []
        self._children: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self.add(modules)

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules, too."""
        for module in modules:
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._tables += hook_tables(module)
                self._children.append(module._modules)
                self._own.append(vars(module))

    def now(self) -> list[Any]:
        """Return what there is now."""
        found: list[Any] = [list(map(len, self._children))]
        if any(self._tables):
            found.append([list(table.values()) for table in self._tables])
        if any(map(dict.__contains__, self._own, repeat("forward"))):
            found.append([own.get("forward") for own in self._own])
        return found


def traced_into(modules: Mapping[str, nn.Module], leaves: Leaves) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose own code is followed. leaves: says which are kept whole, with all that is in them."""
    whole: tuple[str, ...] = ()
    for path, module in modules.items():
        if not path.startswith(whole):
            if leaves(path, module):
                whole = (*whole, f"{path}." if path else "")
            else:
                yield path, module


def dressed(module: nn.Module) -> str | None:
    """What is around the forward of a module, that only a call of the module would run; None: nothing."""
    if any(hook_tables(module)):
        return "it has hooks"
    return "a forward was set on it" if "forward" in vars(module) else None


def kept_for_hooks(modules: Mapping[str, nn.Module], leaves: Leaves, fixed: Collection[str]) -> list[str]:
    """Return the paths of modules with hooks on their gradients that would be traced into, and warn of it.

    modules: those of a model by their paths. fixed: paths at which stages begin. Raises ValueError if a stage begins
    within such a module.
    """
    found = list(_with_gradient_hooks(modules, leaves))
    for path in found:
        who = f"{type(modules[path]).__name__} {path!r}" if path else f"the model ({type(modules[path]).__name__})"
        if not path or any(name.startswith(f"{path}.") for name in fixed):
            raise ValueError(
                f"{who} has hooks on its gradients (register_full_backward_hook), which are called with the whole "
                "module only; register them on a layer in it, or keep it one stage: "
                f"stages=pipeback.Splitting(leaves=[{path!r}])"
            )
    if found:
        warnings.warn(
            f"{type(modules[found[0]]).__name__} {found[0]!r} has hooks on its gradients, so that it is not cut; "
            f"stages=pipeback.Splitting(leaves={found!r}) says so, too",
            stacklevel=2,
        )
    return found


def check_hooks(modules: Mapping[str, nn.Module], leaves: Leaves) -> None:
    """Raise ValueError if a module that is traced into has got hooks on its gradients since the model was cut."""
    for path in _with_gradient_hooks(modules, leaves):
        who = f"{type(modules[path]).__name__} {path!r}" if path else f"the model ({type(modules[path]).__name__})"
        raise ValueError(
            f"{who} has got hooks on its gradients after the pipeline was built, which its stages would not call; "
            "register them before, or build a new Pipeline"
        )


def _with_gradient_hooks(modules: Mapping[str, nn.Module], leaves: Leaves) -> Iterator[str]:
    if any(chain.from_iterable(hook_tables(module)[2:] for module in modules.values())):
        for path, module in traced_into(modules, leaves):
            if any(hook_tables(module)[2:]):
                yield path
