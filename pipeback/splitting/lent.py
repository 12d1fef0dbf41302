"""Lent: a module of which a stage has the layers, and another stage the weights.

A stage that calls a module of an earlier stage gets the weights with the micro-batch. Both may call it at once, in two
threads, so that these weights are never put into the module itself, but into a copy of it that lives for one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeback.splitting.module_walk import register


class Lent(nn.Module):
    """A module that computes with weights of another stage, which come as tensors; its other weights are its own."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.__module = (module,)  # in a tuple, so that it is no child, whose weights would be counted
        self.__names__ = tuple(names)
        for name, parameter in module.named_parameters():
            if name not in names:
                register(self, name, parameter)
        for name, buffer in module.named_buffers():
            register(self, name, buffer, persistent=name in module.state_dict())

    @property
    def __kind__(self) -> str:
        """The name of the class of the module."""
        return type(self.__module[0]).__name__

    def forward(self, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        (module,) = self.__module
        if not torch.is_grad_enabled():  # torch chooses kernels of products by requires_grad, even without a graph
            own = (module.get_parameter(name) for name in self.__names__)
            weights = [w.detach().requires_grad_(p.requires_grad) for w, p in zip(weights, own, strict=True)]
        copies = _copies(module)
        if not self.training:
            for copy in copies.values():
                copy.training = False
        return functional_call(copies[module], dict(zip(self.__names__, weights, strict=True)), args, kwargs)


def _copies(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return a module and those within it, each with a copy that has the same weights, attributes and hooks.

    What is set in the copies, weights for one, is not set in the originals.
    """
    copies = {m: object.__new__(type(m)) for m in module.modules()}
    for original, copy in copies.items():
        vars(copy).update({name: _own(value, copies) for name, value in vars(original).items()})
        for kind in ("_parameters", "_buffers"):
            vars(copy)[kind] = dict(vars(original)[kind])
        vars(copy)["_modules"] = {name: child and copies[child] for name, child in original._modules.items()}
    return copies


def _own(value: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Return an attribute as a copy has it: a method is one of the copy, and a list is not that of the original."""
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, copies.get(value.__self__, value.__self__))
    if isinstance(value, partial):
        given = [copies.get(v, v) if isinstance(v, nn.Module) else _own(v, copies) for v in value.args]
        return partial(_own(value.func, copies), *given, **value.keywords)
    return list(value) if type(value) is list else value
