"""Call arguments: what a model is called with when an x is pushed.

A dictionary, or what a tokenizer gives, holds keyword arguments, a tuple positional ones; any other x is one argument.
Where a forward cannot be called so, but can with x as its one argument (`forward(self, batch)`), it gets x itself; a
list then gives positional arguments, and a dataclass keyword arguments, where only that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Signature, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeback.splitting.whole_model import WholeModel
from pipeback.tensors.batches import bare


class Arguments(NamedTuple):
    """The positional and keyword arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(model: nn.Module, x: Any) -> Arguments:
    """Return the arguments with which a model is called for an x that was pushed."""
    x = x if isinstance(x, Tensor) else bare(x)
    one = isinstance(model, nn.Sequential) and not isinstance(x, Mapping)  # what its first module is called with
    ways = [Arguments((x,), {})] if one else list(_ways(x))
    if len(ways) == 1:
        return ways[0]
    try:
        asked = signature(model.model.forward if isinstance(model, WholeModel) else model.forward)
    except (TypeError, ValueError):
        return ways[0]
    return next((way for way in ways if _takes(asked, way, x)), ways[0])


def _ways(x: Any) -> Iterator[Arguments]:
    """Yield the calls that x may be meant for, the usual one first."""
    if isinstance(x, Mapping) and all(isinstance(key, str) for key in x):
        yield Arguments((), x if isinstance(x, dict) else dict(x))
    if isinstance(x, tuple):
        yield Arguments(tuple(x), {})
    yield Arguments((x,), {})
    if isinstance(x, list):
        yield Arguments(tuple(x), {})
    if is_dataclass(x) and not isinstance(x, Mapping):
        yield Arguments((), {field.name: getattr(x, field.name) for field in fields(x)})


def _takes(asked: Signature, way: Arguments, x: Any) -> bool:
    """Whether a forward can be called so, and x is not rather meant to be taken apart, with a part too many."""
    try:
        asked.bind(*way.args, **way.kwargs)
    except TypeError:
        return False
    if not way.args or way.args[0] is not x:
        return True
    names = [name for name, p in asked.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    return not any(key in names for key in x) if isinstance(x, Mapping) else len(names) == 1 or not isinstance(x, tuple)
