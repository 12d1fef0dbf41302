"""Attribute reads: plain values on which a forward has decided; its stages know only the outcome.

Such a value is a number, a string, a mode (`if self.training`) or a function, and tracing has fixed it. It is an
attribute of a module or of an object that a module has (`self.config.scale`), or a global variable. Which weights are
frozen belongs to it, too: no gradient goes to where all are; and so do hooks. When somebody sets another value, the
model is traced again; with the old value, the old scripts are used again. So it is when the model is evaluated, since a
forward may ask whether autograd records (`torch.is_grad_enabled()`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.splitting.attribute_changes import UNLIKE
from pipeback.splitting.code_reads import code_reads
from pipeback.splitting.module_hooks import Around
from pipeback.splitting.module_walk import walked
from pipeback.tensors.structures import PLAIN

Name = tuple[str, str]  # of an attribute: the path of its module, and its own; of a variable: ":" and the module's name
LONG = 1000  # entries of a list or dictionary that is not looked into
DEEP = 3  # objects within objects that are looked into
_trains = attrgetter("requires_grad")
_NOWHERE = object()


class CallWay(NamedTuple):
    """How a model is called. training: the mode of all its modules; None: their own. graph: if autograd records."""

    training: bool | None
    graph: bool


PUSHED, EVALUATED = CallWay(None, True), CallWay(False, False)
WAYS = PUSHED, EVALUATED, CallWay(False, True), CallWay(True, True)


def way_of(training: bool | None) -> CallWay:
    """How a micro-batch is computed. training: False: it is evaluated; None: it is pushed."""
    return EVALUATED if training is False else CallWay(training, True)


def saved_way(form: Mapping[str, Any], training: bool) -> CallWay:
    """How a micro-batch of a saved form is computed. training: the mode of the model now."""
    if not form.get("graph", True):  # earlier states have none
        return EVALUATED
    return CallWay(None if form["training"] == training else form["training"], True)


class AttributeReads:
    """Gives a number to each combination of values on which a forward decides: equal numbers mean equal values."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """weights: those of the model."""
        self._weights = list(weights)
        self._values: dict[Name, Callable[[], Any]] = {}
        self._objects: list[Any] = []  # those that were looked into
        self._states: list[list[Any]] = []
        self._around = Around()

    def add(self, names: Collection[Name], paths: Mapping[str, nn.Module], traced: Collection[nn.Module]) -> None:
        """Add attributes that a forward has read; earlier traces have not read them and do not depend on them.

        paths: the modules by their paths. traced: those whose own code was followed.
        """
        self._around.add(traced)
        kinds: dict[Any, None] = {type(module): None for module in traced}
        codes = [code_reads(kind) for kind in kinds]
        inside = frozenset[str]().union(*(code.names for code in codes))
        for path, key in sorted(names):
            if path in paths:
                self._add(path, key, paths[path], inside)
        for module, key in sorted({variable for code in codes for variable in code.variables}):
            if module in sys.modules:
                self._add(f":{module}", key, sys.modules[module], inside)

    def _add(self, path: str, key: str, home: Any, inside: frozenset[str], depth: int = 0) -> None:
        """Add an attribute, and those of the object that it is. inside: names of attributes in the code."""
        value = _got(home, key)
        if (path, key) not in self._values and _watched(value) and not (path[:1] == ":" and callable(value)):
            found = self._values[path, key] = lambda: _got(home, key)
            for state in self._states:
                state.append(_kept(found()))
        if depth < DEEP and _opens(value) and not any(value is known for known in self._objects):
            self._objects.append(value)
            for name in sorted(inside.intersection(vars(value))):
                self._add(path, f"{key}.{name}", home, inside, depth + 1)

    def number(self, way: CallWay = PUSHED) -> int:
        """Return the number of the present values where the model is called in this way."""
        now, training = [value() for value in self._values.values()], way.training
        if training is not None:
            now = [training if key == "training" else x for (_, key), x in zip(self._values, now, strict=True)]
        now = [list(map(_trains, self._weights)), self._around.now(), way.graph, *now]
        for number, state in enumerate(self._states):
            if all(a is b or _same(a, b) for a, b in zip(now, state, strict=True)):
                return number
        self._states.append([_kept(value) for value in now])
        return len(self._states) - 1


@contextmanager
def called(model: nn.Module, way: CallWay) -> Iterator[None]:
    """A context within which the model may be called in this way."""
    before = [(m, m.training) for m in walked(model).values()]
    try:
        for m, _ in before if way.training is not None else ():
            m.training = bool(way.training)
        with torch.set_grad_enabled(way.graph):
            yield
    finally:
        for m, mode in before:
            m.training = mode


def _got(home: Any, key: str) -> Any:
    """Return an attribute, or one of an object that it is: "config.scale"."""
    for name in key.split("."):
        home = getattr(home, name, _NOWHERE)
    return home


def _watched(value: Any) -> bool:
    return isinstance(value, (*PLAIN, tuple, list, dict, Tensor)) or callable(value) or _opens(value)


def _opens(value: Any) -> bool:
    """Whether a value is an object with attributes, such as a configuration."""
    return hasattr(value, "__dict__") and not isinstance(value, (*PLAIN, *UNLIKE)) and not callable(value)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal; tensors and objects only if they are the very same."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, PLAIN) and bool(a == b)


def _kept(value: Any) -> Any:
    """Return a copy of lists and dictionaries, which may be changed in place, and any other value itself."""
    if isinstance(value, (list, tuple, dict)) and len(value) > LONG:
        return value
    if isinstance(value, dict):
        return {key: _kept(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return value
