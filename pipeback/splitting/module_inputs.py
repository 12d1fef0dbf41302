"""Module inputs: records how a module uses its arguments: structures may be changed, objects be read only in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeback.private import pytree
from pipeback.tensors.structures import ABSENT, PLAIN, opened, parts

Key = int | str  # the place of an argument, or its keyword


class ModuleInputs:
    """The arguments of a module, before it runs.

    passed: ids of the tensors that stand in objects and that the module has not used; `look` notes each use. Raises
    ValueError if an object stands in two places.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen: set[int] = set()
        self.args = dict[Key, Any]([*enumerate(args), *kwargs.items()])
        self.before = {k: opened(v, seen) for k, v in self.args.items() if not isinstance(v, (Tensor, *PLAIN))}
        self.versions = {id(t): t._version for t in parts([*self.args.values()]) if isinstance(t, Tensor)}
        self.passed = {id(t) for tensors, form in self.before.values() if form.objects for t in tensors}

    def look(self, *values: Any) -> None:
        """Note that the module uses the tensors in these arguments."""
        if self.passed:
            self.passed.difference_update(map(id, parts(values)))

    def apart(self, module: nn.Module, output: Any, decides: Callable[[str], None]) -> Any:
        """Return the module's output; a tensor in it that the module was given is replaced by an equal one.

        For another micro-batch the module may return a tensor of its own, as a layer that is dropped now and then does.
        So it must be told whether the forward goes on with what it gave or with what it got, and what it got needs a
        gradient if the module has weights, unless it stands beside what needs one, as a mask that layers hand on does.
        A module of torch, a dropout, decides by numbers that it holds, and keeps to that while they stay. decides:
        called with the name of each such number.
        """
        found = parts(output)
        if not any(id(part) in self.versions for part in found):
            return output  # the rule: it gives nothing that it was given
        grows = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        grows = grows and not any(isinstance(part, Tensor) and part.requires_grad for part in found)
        return self._apart(module, output, grows, decides)

    def _apart(self, module: nn.Module, output: Any, grows: bool, decides: Callable[[str], None]) -> Any:
        if type(output) is tuple:
            return tuple(self._apart(module, part, grows, decides) for part in output)
        if id(output) not in self.versions or id(output) in self.passed:
            return output
        if output._version != self.versions[id(output)] or output.layout is not torch.strided:
            return output  # what is changed in place is one tensor for both
        if type(module).__module__.startswith("torch.nn."):
            for key in [key for key, value in vars(module).items() if type(value) in (int, float)]:
                decides(key)
            return output
        if grows and not output.requires_grad and output.is_floating_point():
            return output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
        with torch.enable_grad():
            return output.view_as(output)

    def placed(self, place: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, as they were before the module ran, in the form that a recorded call has them."""
        found = {key: self._placed(key, place) for key in self.args}
        args = tuple(value for key, value in found.items() if isinstance(key, int))
        return args, {key: value for key, value in found.items() if isinstance(key, str)}

    def _placed(self, key: Key, place: Callable[[Any], Any]) -> Any:
        if key not in self.before:
            return place(self.args[key])
        tensors, form = self.before[key]
        known = [ABSENT if form.objects and id(t) in self.passed else place(t) for t in tensors]
        numbers = iter(known)
        leaves = [next(numbers) if form.is_tensor(n) else place(c) for n, c in enumerate(form.constants)]
        return pytree.tree_unflatten(leaves, form.spec)

    def changed(self) -> tuple[Key, ...]:
        """Return the arguments whose content the module has changed."""
        return tuple(key for key, before in self.before.items() if not _same(before, opened(self.args[key])))


def _same(a: Any, b: Any) -> bool:
    """Whether two structures hold the same tensors, and equal constants."""
    return a[1] == b[1] and all(x is y for x, y in zip(a[0], b[0], strict=True))
