"""Read values: what a forward reads beside its input and its weights, and graphs traced from it contain: numbers, words
and functions, alone or in tuples, lists and dictionaries.

They are attributes of modules; attributes of the modules' classes, of objects that the modules have, such as a
configuration or a schedule, and of these objects' classes; and global variables. Of all but the modules' own attributes
only those are looked at whose names stand in the code (`code_reads`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeback.splitting.attribute_changes import MACHINERY, UNLIKE
from pipeback.splitting.code_reads import CodeReads, code_reads

_PLAIN = int, float, complex, str, type(None), Enum, torch.dtype, torch.device  # bool is an int
_FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType, partial
_NOT_USERS = "torch", "builtins", "pipeback"
LONG = 1000  # entries, with those within entries, of a list or dictionary that is looked into
DEEP = 3  # objects within objects that are looked into
NESTED = 8  # lists and dictionaries within such
SETTING = "__setting__"  # of a segment: how the whole model is set, by a number that holds in one process


Home = Mapping[str, Any]


class ReadPlace(NamedTuple):
    """Where attributes or variables lie. keys: their names. wants: whether one of such a name and value is read."""

    home: Home
    keys: frozenset[str]
    wants: Callable[[str, Any], bool]


class Same:
    """Equals an object, and nothing else, whatever the object says."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value

    __hash__ = None  # type: ignore[assignment]


class ReadValues:
    """What the forwards of these modules read, as it is now.

    found: (home, name, value), where the value is a copy if it may be changed in place. places: where others may come.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.found: list[tuple[Home, str, Any]] = []
        self.places: list[ReadPlace] = []
        self._seen: set[int] = set()  # objects and classes
        modules = list(modules)
        kinds: list[Any] = [kind for kind in dict.fromkeys(map(type, modules)) if _users(kind)]
        codes = [code_reads(kind) for kind in kinds]
        names = _names(codes)
        for module in modules:
            ours = type(module).__module__.partition(".")[0] == "pipeback"
            self._place(vars(module), partial(_of_modules, frozenset() if ours else names), names, 0 if ours else DEEP)
        for kind in kinds:
            self._of_class(kind, names)
        self._of_variables(codes, names)

    def _place(self, home: Home, wants: Callable[[str, Any], bool], names: frozenset[str], deep: int) -> None:
        self.places.append(
            ReadPlace(home, frozenset(home), lambda key, value: wants(key, value) and bool(_kept(value)))
        )
        for key, value in list(home.items()):
            if wants(key, value):
                self._value(home, key, value, names, deep)

    def _value(self, home: Home, key: str, value: Any, names: frozenset[str], deep: int) -> None:
        kept = _kept(value)
        if kept is not None:
            self.found.append((home, key, *kept))
        if deep and _opens(value) and id(value) not in self._seen:
            self._seen.add(id(value))
            kind: Any = type(value)
            methods = {name for each in kind.__mro__ if _users(each) for name in vars(each)}
            codes = [code_reads(kind, name) for name in sorted(methods & {"__call__", *names})]
            names = names | _names(codes)
            self._place(vars(value), partial(_named, names), names, deep - 1)
            self._of_class(kind, names)
            self._of_variables(codes, names)

    def _of_class(self, kind: type, names: frozenset[str]) -> None:
        for each in kind.__mro__:
            if _users(each) and id(each) not in self._seen:
                self._seen.add(id(each))
                self._place(vars(each), partial(_of_classes, names), names, 1)

    def _of_variables(self, codes: Iterable[CodeReads], names: frozenset[str]) -> None:
        for module, name in sorted({variable for code in codes for variable in code.variables}):
            around = vars(sys.modules[module]) if module in sys.modules else {}
            value = around.get(name)
            if isinstance(value, type):
                self._of_class(value, names)
            elif name in around and not callable(value):
                self._value(around, name, value, names, DEEP)


def _users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _NOT_USERS


def _names(codes: Iterable[CodeReads]) -> frozenset[str]:
    return frozenset[str]().union(*(code.names for code in codes))


def _of_modules(names: frozenset[str], key: str, value: Any) -> bool:
    """Whether an attribute of a module is read. Torch's own code is not looked into, but its modules have only numbers,
    words, functions and tuples that count; what collects something beside the forward does not.
    """
    if key == SETTING:
        return True
    if key.startswith("__") or key == "training" or (key.startswith("_") and key in MACHINERY):
        return False
    return key in names or _plain(value) or isinstance(value, tuple) or callable(value)


def _of_classes(names: frozenset[str], key: str, value: Any) -> bool:
    return key in names and not isinstance(value, FunctionType)


def _named(names: frozenset[str], key: str, value: Any) -> bool:
    return key in names


def _opens(value: Any) -> bool:
    """Whether a value is an object with attributes, such as a configuration."""
    return hasattr(value, "__dict__") and not isinstance(value, (*_PLAIN, *_FUNCTIONS, *UNLIKE))


def _kept(value: Any) -> tuple[Any] | None:
    """Return, in a tuple, what equals a value as long as it stays the same; None if graphs do not contain it."""
    if _plain(value) or isinstance(value, _FUNCTIONS):
        return (value,)
    if _opens(value) or callable(value):
        return (Same(value),)
    return (_copy(value),) if isinstance(value, (tuple, list, dict)) and _short(value) else None


def _plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value).__module__ == "numpy" and getattr(value, "shape", None) == ())


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(x) for key, x in value.items()}
    if isinstance(value, list):
        return list(map(_copy, value))
    return tuple(map(_copy, value)) if isinstance(value, tuple) else value


def _short(value: Any) -> bool:
    """Whether there are only plain values in a structure, and not too many."""
    return all(n < LONG and _plain(x) for n, x in enumerate(_leaves(value)))


def _leaves(value: Any, deep: int = NESTED) -> Iterator[Any]:
    parts: Collection[Any] = [*value, *value.values()] if isinstance(value, dict) else value
    for x in parts:
        if deep and isinstance(x, (tuple, list, dict)):
            yield from _leaves(x, deep - 1)
        else:
            yield x
