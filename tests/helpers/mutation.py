"""The library with other lines in one module, in a process that has not imported it yet: what is missing is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

LIBRARY = Path(__file__).parents[2] / "pipeback"
Change = Callable[[str], str]


class _Loader(SourceFileLoader):
    change: Change

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text(encoding="utf-8")
        return compile(self.change(text), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, name: str, change: Change) -> None:
        self.name, self.change = name, change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "pipeback." + self.name.replace("/", "."):
            return None
        file = str(LIBRARY / f"{self.name}.py")
        loader = _Loader(fullname, file)
        loader.change = self.change  # type: ignore[method-assign]
        return spec_from_file_location(fullname, file, loader=loader)


def change(name: str, how: Change) -> None:
    """Have the text of the module `pipeback/<name>` be what `how` makes of it."""
    sys.meta_path.insert(0, _Finder(name, how))
