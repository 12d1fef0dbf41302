"""Module settings: modes and numbers of modules that decide what a forward computes, and whether it draws random
numbers.

A dropout probability is one of them. A pipeline is not told when one is set, so it compares them before every push.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import getitem
from typing import Any, Literal

from torch import nn

from pipeback.stages.read_values import SETTING, ReadValues


class Settings:
    """Attributes of modules, as they are now.

    which: "modes" are the training modes of the modules, and of the model that a segment belongs to. "numbers" are the
    other numbers; of the integers only 0 and 1, since the rest are widths and counts. "all" is everything that graphs
    traced from these modules contain (`ReadValues`); it can only be compared.
    """

    def __init__(self, modules: Iterable[nn.Module], which: Literal["modes", "numbers", "all"] = "numbers") -> None:
        modules = list(modules)
        every: list[Any] = [vars(module) for module in modules]
        found: list[Any]
        wants: list[Any] = [partial(_is, which)] * len(every)
        if which == "all":
            read = ReadValues(modules)
            found, every, wants = read.found, [p.home for p in read.places], [p.wants for p in read.places]
        else:
            found = [(home, key, value) for home in every for key, value in home.items() if _is(which, key, value)]
        self._homes: list[Any] = [home for home, _, _ in found]
        self._keys = [key for _, key, _ in found]
        self._values = [value for _, _, value in found]
        # an attribute that is set anew may hide one of the class
        self._known: list[tuple[dict[str, Any], frozenset[str], Callable[[str, Any], bool]]] = (
            [] if which == "modes" else [(home, frozenset(home), want) for home, want in zip(every, wants, strict=True)]
        )
        self._every, self._sizes = every, [len(home) for home in every]

    @classmethod
    def of(cls, module: nn.Module) -> Settings:
        """The modes and the numbers of a module and of those in it."""
        return cls.joined([cls(module.modules(), "modes"), cls(module.modules())])

    @classmethod
    def joined(cls, several: Iterable[Settings]) -> Settings:
        """Return the settings of all as one object, so that one pass finds out whether any has changed."""
        whole = cls(())
        for each in several:
            whole._homes += each._homes
            whole._keys += each._keys
            whole._values += each._values
            whole._known += each._known
            whole._every += each._every
            whole._sizes += each._sizes
        return whole

    def changed(self) -> bool:
        """Whether one of the attributes has changed or is gone, or there is another one."""
        try:
            other = self._values != list(map(getitem, self._homes, self._keys))
        except Exception:  # it is gone, or is something now that cannot be compared, such as a tensor
            return True
        return other or (list(map(len, self._every)) != self._sizes and any(True for _ in self._new()))

    @property
    def values(self) -> list[Any]:
        """Return the values that were read, in the order of the modules, as they may be saved."""
        return [value for key, value in zip(self._keys, self._values, strict=True) if key != SETTING]

    def with_values(self, values: Sequence[Any]) -> Settings:
        """The same attributes with these values, as `values` has returned them, instead of those that were read.

        The model that a segment belongs to is set as if all its modules had the segment's mode, except that it stays as
        it is set where its modules differ and the segment's mode is the same.
        """
        other, given = copy.copy(self), iter(values)
        pairs = zip(self._keys, self._values, strict=True)
        other._values = [now if key == SETTING else next(given) for key, now in pairs]
        places = enumerate(zip(self._homes, self._keys, strict=True))
        modes = {id(home): n for n, (home, key) in places if key == "training"}
        for n, (home, key) in enumerate(zip(self._homes, self._keys, strict=True)):
            if key == SETTING:
                mode, in_mode = other._values[modes[id(home)]], home["__in_mode__"]
                if mode != self._values[modes[id(home)]] or self._values[n] in in_mode.values():
                    other._values[n] = in_mode.get(mode, self._values[n])
        return other

    def put(self) -> None:
        """Set the attributes to the values that were read, and remove those that have come since."""
        for home, key in list(self._new()):
            del home[key]
        for home, key, value in zip(self._homes, self._keys, self._values, strict=True):
            home[key] = value

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context within which the attributes have the values that were read."""
        new = [(home, key, home.pop(key)) for home, key in list(self._new())]
        every = zip(self._homes, self._keys, self._values, strict=True)
        odd = [(home, key, value, home[key]) for home, key, value in every if home.get(key, value) != value]
        for home, key, value, _ in odd:
            home[key] = value
        try:
            yield
        finally:
            for home, key, now in (*((home, key, now) for home, key, _, now in odd), *new):
                home[key] = now

    def odd(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the attributes that have changed or come: the dict of a module's attributes, and the name."""
        yield from self._new()
        for home, key, value in zip(self._homes, self._keys, self._values, strict=True):
            if home.get(key, value) != value:
                yield home, key

    def _new(self) -> Iterator[tuple[dict[str, Any], str]]:
        for home, keys, wants in self._known:
            if len(home) != len(keys):
                yield from ((home, key) for key in home.keys() - keys if wants(key, home[key]))


def _is(which: str, key: str, value: Any) -> bool:
    if which == "modes" or key == "training":
        return which == "modes" and key in ("training", SETTING)
    return key != SETTING and (type(value) is float or (isinstance(value, int) and value in (0, 1)))


class Mirror:
    """Copies of modules, which follow the modes and numbers that are set in the originals.

    modules: the original ones, and those of each copy in the same order; they are alike.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]]) -> None:
        self._originals = modules[0]
        self._copies: dict[int, list[dict[str, Any]]] = {}
        for module, *copies in zip(*modules, strict=True):  # a module that two stages share has two copies
            self._copies.setdefault(id(vars(module)), []).extend(map(vars, copies))
        self._look()

    def _look(self) -> None:
        self._settings = Settings(self._originals, "modes"), Settings(self._originals)

    def changed(self) -> bool:
        """Whether something was set in the originals since the copies last followed."""
        return any(settings.changed() for settings in self._settings)

    def follow(self) -> None:
        """Set in the copies what was set in the originals; nobody may compute with them meanwhile."""
        for settings in self._settings:
            for home, key in settings.odd():
                for other in self._copies[id(home)]:
                    other[key] = home[key]
        self._look()
