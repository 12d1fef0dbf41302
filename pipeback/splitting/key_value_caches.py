"""Key-value caches: a model of transformers fills one in every forward, though only generation needs it.

A model computes with the tensors in its cache, whose strides differ from those without one. So a forward is traced with
its cache, as the user calls it, and the cache is removed from the model's output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from pipeback.private import pytree


def caching(modules: Iterable[nn.Module]) -> bool:
    """Whether a configuration of transformers, in one of these modules, asks for caches."""
    having = [m for m in modules if "config" in vars(m) or hasattr(type(m), "config")]
    configs = [c for m in having if (c := getattr(m, "config", None)) is not None]
    return any(_theirs(type(c)) and getattr(c, "use_cache", None) is True for c in configs)


def without_caches(output: Any) -> Any:
    """Return the output of a model, with None in place of its caches."""
    return pytree.tree_map(lambda x: None if _cache(x) else x, output, is_leaf=_cache)


def _cache(value: Any) -> bool:
    return any(_theirs(kind) and kind.__name__.endswith("Cache") for kind in type(value).__mro__)


def _theirs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "transformers"
