"""The catalogue: devices, models, methods and constants with their sources, as TOML files of this folder.

A file of the user's own has the same form and adds to it. It is TOML because Python reads that without a package.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

OWN = "PIPEBACK_CATALOGUE"  # an environment variable with files of the user's own, parted as those of PATH are
KINDS = ("devices", "models", "methods", "constants")


def table(kind: str) -> dict[str, Any]:
    """All entries of a kind by name; those of the user's files add to ours, value by value.

    Raises ValueError for a file that cannot be read, or that has another form.
    """
    entries: dict[str, Any] = {}
    for source, content in _contents():
        part = content.get(kind, {})
        if not isinstance(part, dict) or not all(isinstance(entry, dict) for entry in part.values()):
            raise ValueError(f"{source}: {kind} needs one table per name; write for example [{kind}.mine]")
        for name, entry in part.items():
            entries[name] = {**entries.get(name, {}), **entry}
    return entries


def defaults(kind: str) -> Mapping[str, Any]:
    """The values that entries of a kind may leave out."""
    values: Mapping[str, Any] = _ours(kind).get("defaults", {})
    return values


def key(what: str, name: str, known: Iterable[str]) -> str:
    """The name as the catalogue writes it, whatever its case and hyphens. Raises ValueError; suggests the nearest."""
    names = {_plain(other): other for other in known}
    if _plain(name) in names:
        return names[_plain(name)]
    near = get_close_matches(_plain(name), names, n=1, cutoff=0.55)
    hint = f"; did you mean {names[near[0]]!r}?" if near else ""
    raise ValueError(f"there is no {what} {name!r}{hint} (known: {', '.join(names.values())})")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _contents() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in KINDS:
        yield f"{kind}.toml", _ours(kind)
    for path in filter(None, os.environ.get(OWN, "").split(os.pathsep)):
        try:
            yield path, tomllib.loads(Path(path).expanduser().read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{OWN}={path} cannot be read: {error}") from error


@cache
def _ours(kind: str) -> Mapping[str, Any]:
    return tomllib.loads(files(__name__).joinpath(f"{kind}.toml").read_text("utf-8"))
