"""Module walk: the modules of a model, and the tensors in them, by their names; cutting a model asks for them often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeback.private import pytree

KINDS: tuple[Literal["_parameters"], Literal["_buffers"]] = "_parameters", "_buffers"  # of tensors in modules
NO_TENSORS = {dict, OrderedDict, list, tuple, set, type(None), bool, int, float, str}  # types of most attributes


class Modules(dict[str, nn.Module]):
    """The modules of a model, by their paths."""

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices of all weights and buffers, when somebody has asked first."""
        return {t.device for kind in KINDS for _, t in held(self, kind)}

    @property
    def device(self) -> torch.device | None:
        """The device of all weights and buffers; None if they are on several, or on none."""
        found = self.devices - {torch.device("meta")}
        return found.pop() if len(found) == 1 else None


def walked(model: nn.Module) -> Modules:
    """Return `dict(model.named_modules())` in a fraction of its time, which grows with the depth of every module."""
    if not model._modules and type(model).named_modules is nn.Module.named_modules:
        return Modules({"": model})
    found = Modules()
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> None:
        if module in seen:
            return
        if type(module).named_modules is not nn.Module.named_modules:
            found.update(module.named_modules(seen, path))
            return
        seen.add(module)
        found[path] = module
        below = f"{path}." if path else ""
        for name, child in module._modules.items():
            if child is not None:
                walk(child, below + name)

    walk(model, "")
    return found


def held(modules: Mapping[str, nn.Module], where: Literal["_parameters", "_buffers"]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that modules hold, each once, by their names in the model: named_parameters or named_buffers.

    modules: all of a model, by their paths.
    """
    seen: set[int] = set()
    for path, module in modules.items():
        for key, tensor in getattr(module, where).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{key}" if path else key, tensor


def beside(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the names of the tensors that modules hold as plain attributes, by their identity."""
    return {
        id(value): f"{path}.{key}".lstrip(".")
        for path, module in modules.items()
        if not NO_TENSORS.issuperset(map(type, vars(module).values()))
        for key, value in vars(module).items()
        if type(value) not in NO_TENSORS and isinstance(value, Tensor)
    }


def unsaved_buffers(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the buffers that are in no state_dict."""
    found = ((path, key) for path, module in modules.items() for key in module._non_persistent_buffers_set)
    return [f"{path}.{key}".lstrip(".") for path, key in found]


def place_of(name: str) -> tuple[str, str]:
    """Return the path of the module and the attribute that such a name tells of."""
    path, _, key = name.rpartition(".")
    return path, key.partition("[")[0]


def in_structures(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the names of the tensors in lists, tuples and dictionaries that modules hold, and beside their forward."""
    found: dict[int, str] = {}
    own = {*vars(nn.Module())}
    for path, module in modules.items():
        for key, value in vars(module).items():
            if key not in own and type(value) in (list, tuple, dict, OrderedDict):
                tensors = ((n, x) for n, x in enumerate(pytree.tree_leaves(value)) if isinstance(x, Tensor))
                found.update((id(x), f"{path}.{key}[{n}]".lstrip(".")) for n, x in tensors)
    for kind in set[Any](map(type, modules.values())):
        around: dict[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
        found.update((id(x), f"{kind.__module__}:{key}") for key, x in around.items() if isinstance(x, Tensor))
    return found


def identical(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two sets of attributes have the same names, in the same order, and the very same values."""
    return list(a) == list(b) and all(map(is_, a.values(), b.values()))


def register(root: nn.Module, name: str, part: Any, persistent: bool = True) -> None:
    """Put a module, parameter or buffer under the root, with empty modules on the way."""
    *path, key = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root._modules[step]  # type: ignore[assignment]
    if isinstance(part, nn.Parameter):
        root.register_parameter(key, part)
    elif isinstance(part, Tensor):
        root.register_buffer(key, part, persistent)
    else:
        root.add_module(key, part)
