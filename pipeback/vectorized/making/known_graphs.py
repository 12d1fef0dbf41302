"""Known graphs: graphs of modules that are alike in all that decides what they compute are traced once per process.

A comparison of methods builds the same stages again and again, and tracing them takes longer than a short training. So
what was traced is kept where a module can be described: it consists of modules of torch or of this library, which hold
nothing but weights, numbers, words, types and functions of torch. Code of the user's may read more than its modules
hold, and is always traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pipeback.stages.tracing_lock import TRACING
from pipeback.vectorized.making.bounded_cache import BoundedCache
from pipeback.vectorized.tracing.graphs import Graphs

MOST = 128  # that are kept
OURS = "torch", "pipeback"
_PLAIN = bool, int, float, complex, str, type(None), torch.dtype, torch.device
_KNOWN: BoundedCache[Hashable, Graphs] = BoundedCache()


def known(module: nn.Module, setting: tuple[Hashable, ...], trace: Callable[[], Graphs]) -> Graphs:
    """Return what `trace` makes of a module, or has made of one like it in the same setting.

    setting: all that decides what is traced, beside the module and how torch is set. Nobody may change a graph.
    """
    told = description(module)
    if told is None:
        return trace()
    key = (
        told,
        setting,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )
    with TRACING:
        if key not in _KNOWN:
            _KNOWN[key] = trace()
        return _KNOWN.used(key, most=MOST)


def description(module: nn.Module) -> Hashable | None:
    """Return all that decides what a module computes from weights and inputs; None if that is more than its own plain
    values, or not known.
    """
    numbers: dict[int, int] = {}  # of modules and weights, since one may be there twice
    found: list[Hashable] = []
    for name, part in module.named_modules(remove_duplicate=False):
        kind = type(part)
        if kind.__module__.partition(".")[0] not in OURS:
            return None
        held: list[Hashable] = []
        for key, value in vars(part).items():
            told = _told(key, value, numbers)
            if told is None:
                return None
            held.append((key, told))
        found.append((name, kind, kind.forward, numbers.setdefault(id(part), len(numbers)), *held))
    return tuple(found)


def _told(key: str, value: Any, numbers: dict[int, int]) -> Hashable | None:
    """Return an attribute of a module as a plain value, in which 1 is not `True`; None if that is not possible."""
    if key == "_parameters":
        return tuple(
            (name, None if p is None else (numbers.setdefault(id(p), len(numbers)), p.requires_grad))
            for name, p in value.items()
        )
    if key == "_modules":  # they have a description of their own
        return tuple((name, part is None) for name, part in value.items())
    if isinstance(value, (dict, set, list)):  # buffers and hooks, for two
        return None if value else ("nothing",)
    return _plain(value)


def _plain(value: Any) -> Hashable | None:
    if type(value) is tuple or isinstance(value, torch.Size):
        every = tuple(map(_plain, value))
        return None if None in every else (type(value), every)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        # what a closure holds is not looked into, and would be kept as long as the graph
        ours = str(value.__module__).partition(".")[0] in OURS and getattr(value, "__closure__", None) is None
        return ("function", value) if ours else None
    return (type(value), value) if isinstance(value, _PLAIN) and type(value) in _PLAIN else None
