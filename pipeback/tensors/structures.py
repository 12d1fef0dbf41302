"""Structures: takes nested tuples, lists, dictionaries and objects apart into tensors and the rest.

An object of a class written in Python (a dataclass, a cache, a dictionary with methods) is taken apart into its
attributes and, if it is a list or a dictionary, its items. A stage makes a new object for every micro-batch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.private import pytree
from pipeback.tensors import named_classes

PLAIN = (int, float, bool, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format,
         torch.layout, torch.Size, slice, range)  # fmt: skip
# types of values that are never taken apart
SINGLE = {Tensor, nn.Parameter, *PLAIN} - {torch.Size}
# these may stand in attributes of objects, too; they are the same for every micro-batch
FIXED = (type, Enum, types.FunctionType, types.BuiltinFunctionType)
MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclass(frozen=True)
class Ref:  # not a tuple, since tuples are taken apart
    """A reference to a tensor by its number."""

    number: int


SINGLE.add(Ref)


def parts(value: Any) -> list[Any]:
    """Return what pytree.tree_leaves returns, in a fraction of its time for tuples, lists and dictionaries."""
    kind = type(value)
    if kind in SINGLE:
        return [value]
    if kind is torch.Size:
        return list(value)
    if kind is not tuple and kind is not list and kind is not dict:
        return pytree.tree_leaves(value)
    return [leaf for part in (value.values() if kind is dict else value) for leaf in parts(part)]


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a structure of tuples, lists and dictionaries with one in it."""
    return isinstance(value, Tensor) or any(isinstance(x, Tensor) for x in parts(value))


class Object:
    """An object taken apart. values: those of its attributes, by `names`, then its items, by `keys` if it has keys."""

    def __init__(self, kind: Any, names: Sequence[str], keys: Sequence[Any] | None, values: Sequence[Any]) -> None:
        self.kind, self.names, self.keys, self.values = kind, tuple(names), keys and tuple(keys), list(values)

    def made(self) -> Any:
        """Return a new object with these values."""
        values = [made(value) for value in self.values]
        if issubclass(self.kind, tuple):
            return tuple.__new__(self.kind, values)
        found: Any = self.kind.__new__(self.kind)
        for name, value in zip(self.names, values, strict=False):
            object.__setattr__(found, name, value)  # frozen dataclasses refuse plain assignment
        held = values[len(self.names) :]
        if isinstance(found, dict):
            dict.update(found, zip(self.keys or (), held, strict=True))
        elif isinstance(found, list):
            list.extend(found, held)
        return found


pytree.register_pytree_node(
    Object,
    lambda x: (x.values, (x.kind, x.names, x.keys)),
    lambda values, context: Object(context[0], context[1], context[2], list(values)),
    serialized_type_name="pipeback.tensors.structures.Object",
    to_dumpable_context=named_classes.dumped,
    from_dumpable_context=lambda plain: named_classes.loaded(plain, _makeable),
)


class Form(NamedTuple):
    """A structure without its tensors: where they stand, and the constants that stand elsewhere."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # one for every place; `Ref(n)` is the n-th tensor
    objects: bool = False  # whether the structure has objects in it

    def is_tensor(self, place: int) -> bool:
        """Whether a tensor stands at this place."""
        return isinstance(self.constants[place], Ref)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with these tensors."""
        leaves = [tensors[c.number] if isinstance(c, Ref) else c for c in self.constants]
        found = pytree.tree_unflatten(leaves, self.spec)
        return made(found) if self.objects else found


def opened(
    value: Any, seen: set[int] | None = None, opens: Callable[[Any], bool] | None = None
) -> tuple[list[Tensor], Form]:
    """Return the tensors of a structure, in order, and its form. seen: ids of objects found so far. opens: see `apart`.

    Raises ValueError for an object that stands in two places.
    """
    leaves, spec = _flattened(value)
    objects = any(type(x) not in SINGLE and (opens or openable)(x) for x in leaves)
    if objects:
        leaves, spec = pytree.tree_flatten(apart(value, set() if seen is None else seen, opens))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    numbers = iter(range(len(tensors)))
    return tensors, Form(spec, tuple(Ref(next(numbers)) if isinstance(x, Tensor) else x for x in leaves), objects)


def _flattened(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a structure and its form; that of a flat tuple or list is looked up, which is cheap."""
    kind = type(value)
    if kind in SINGLE:
        return [value], _LEAF
    if (kind is tuple or kind is list) and SINGLE.issuperset(map(type, value)):
        return list(value), _flat(kind is tuple, len(value))
    return pytree.tree_flatten(value, is_leaf=_packed)


_LEAF = pytree.tree_flatten(0)[1]


@lru_cache(256)
def _flat(is_tuple: bool, count: int) -> pytree.TreeSpec:
    return pytree.tree_flatten((0,) * count if is_tuple else [0] * count)[1]


def fixed(value: Any) -> bool:
    """Whether a value is the same for every micro-batch: a class, or a function that holds nothing."""
    return isinstance(value, FIXED) and not getattr(value, "__closure__", None)


def _packed(value: Any) -> bool:
    """Whether a value is a tuple that can be made of tensors only."""
    return isinstance(value, nn.utils.rnn.PackedSequence)


def openable(value: Any) -> bool:
    """Whether a value is an object that can be taken apart and made anew."""
    if _packed(value):
        return True
    if isinstance(value, (Tensor, nn.Module, torch.Generator, Ref, *PLAIN, *FIXED)):
        return False
    return (hasattr(value, "__dict__") or is_dataclass(value)) and _of_python(type(value))


def is_named_tuple(kind: type) -> bool:
    """Whether this is the class of a named tuple that is a structure of its own; a PackedSequence is an object."""
    return _named(kind) and not issubclass(kind, nn.utils.rnn.PackedSequence)


def _named(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _makeable(kind: type) -> bool:
    """Whether a saved state may name this class as that of an object."""
    return _named(kind) or (_of_python(kind) and not issubclass(kind, nn.Module))


def _of_python(kind: type) -> bool:
    """Whether objects of this class are made of attributes, and items if it is a list or a dictionary."""
    if not kind.__flags__ & MADE_IN_PYTHON:
        return False
    plain = kind.__new__ in (object.__new__, dict.__new__, list.__new__)
    bases = [base for base in kind.__mro__ if not base.__flags__ & MADE_IN_PYTHON]
    return plain and all(base in (object, dict, list) for base in bases)


def apart(value: Any, seen: set[int], opens: Callable[[Any], bool] | None = None) -> Any:
    """Return a structure with its objects taken apart.

    opens: which objects to take apart, of those that are `openable`; an object of these may stand in two places. None:
    all. Raises ValueError if one stands in two places, or in itself.
    """

    def open_it(x: Any) -> Any:
        kind = type(x)
        if kind in SINGLE:
            return x
        if kind is tuple or kind is list:
            return kind([open_it(part) for part in x])
        if kind is dict:
            return {key: open_it(part) for key, part in x.items()}
        if not pytree.tree_is_leaf(x, is_leaf=_packed):
            return pytree.tree_map(open_it, x, is_leaf=lambda part: part is not x)
        if not (opens or openable)(x):
            return x
        if id(x) in seen:
            raise ValueError(
                f"an object of {type(x).__name__} stands in two places of what a module is given, and a stage would "
                "make two objects of it; pass it once, or give the path of the module whose forward passes it in "
                "stages=pipeback.Splitting(leaves=[...]), '' for the whole model"
            )
        seen.add(id(x))
        own = _attributes(x)
        keys = list(x) if isinstance(x, dict) else None
        held = list(dict.values(x)) if isinstance(x, dict) else list(x) if isinstance(x, (list, tuple)) else []
        found = Object(kind, list(own), keys, [open_it(inner) for inner in [*own.values(), *held]])
        if opens is not None:
            seen.discard(id(x))
        return found

    return open_it(value)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that is taken apart; those of a dataclass may stand in slots."""
    slots = [f.name for f in fields(value)] if is_dataclass(value) and not hasattr(value, "__dict__") else []
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def made(value: Any) -> Any:
    """Return a structure with its objects made anew."""
    if type(value) in SINGLE:
        return value
    is_object: Callable[[Any], bool] = lambda x: isinstance(x, Object)  # noqa: E731
    return pytree.tree_map(lambda x: x.made() if is_object(x) else x, value, is_leaf=is_object)


class Absent(Tensor):
    """Takes the place of a tensor in an object if the module that receives the object does not use this tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "a module looks at a tensor that it did not look at when the model was traced; have one module "
            "contain all modules that pass the object on, and give its path in stages=pipeback.Splitting(leaves=[...])"
        )


class Nothing(Enum):
    """The marker for `Absent` in a recorded call."""

    ABSENT = "absent"


ABSENT = Nothing.ABSENT
UNSEEN = torch.empty(0).as_subclass(Absent)
