"""Plug-ins by name: our own, and other packages' entry points."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple


class Plugins(NamedTuple):
    """One kind of plug-in.

    kind: what an error calls it. group: of the entry points, and the package that ours stand in. ours: name to
    "module:attribute" in that package; imported when first asked for, so that a broken plug-in breaks only itself.
    """

    kind: str
    group: str
    ours: Mapping[str, str]

    def available(self) -> list[str]:
        return [*self.ours, *sorted({point.name for point in entry_points(group=self.group)} - set(self.ours))]

    def find(self, name: str) -> Callable[..., Any]:
        """The class or function that `name` stands for. Raises ValueError that lists the names there are."""
        if name in self.ours:
            module, _, attribute = self.ours[name].partition(":")
            ours: Callable[..., Any] = getattr(import_module(f"{self.group}.{module}"), attribute)
            return ours
        for point in entry_points(group=self.group):
            if point.name == name:
                theirs: Callable[..., Any] = point.load()
                return theirs
        names = self.available()
        raise ValueError(f"unknown {self.kind} {name!r}{_nearest(name, names)}; available: {', '.join(names)}")

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.find(name)).parameters)

    def derived(self, name: str, *known: int) -> dict[str, Any]:
        """Values for options that `name` alone leaves out, from what is known of the training."""
        values: dict[str, Any] = getattr(self.find(name), "derived", lambda *_: {})(*known)
        return values

    def create(self, name: str, base: type, options: Mapping[str, Any]) -> Any:
        """Build an instance of `base`. Raises ValueError for an unknown name or option and suggests the nearest."""
        build, kind = self.find(name), self.kind
        parameters = inspect.signature(build).parameters.values()
        known = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for option in options:
            if option not in known and not open_ended:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise ValueError(f"{kind} {name!r} has no option {option!r}{_nearest(option, known)}; {takes}")
        missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in options]
        if missing:
            raise ValueError(f"{kind} {name!r} needs the option {missing[0]}=")
        built = build(**options)
        if not isinstance(built, base):
            wanted = f"pipeback.{base.__name__}"
            raise ValueError(f"{kind} {name!r} built a {type(built).__name__}; a plug-in must build a {wanted}")
        return built


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
