"""The library with one line left out: what does not wait must be noticed."""

from __future__ import annotations

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

LIBRARY = Path(__file__).parents[2] / "pipeback"
WAITS = re.compile(r"wait_event|wait_stream|record_stream|_streams\.(given|arrived)\(|with (left|.*\bon)\(")
FILES = "streams", "streaming", "offload", "store"


def waits() -> list[tuple[str, int]]:
    """Every line of these files that has one thing wait for another: (file, number of the line)."""
    return [
        (name, n)
        for name in FILES
        for n, line in enumerate((LIBRARY / f"{name}.py").read_text(encoding="utf-8").splitlines())
        if WAITS.search(line) and not line.lstrip().startswith(("def ", "from "))
    ]


def left_out(text: str, number: int) -> str:
    """The same without what this line does; a block that it begins stays."""
    lines = text.splitlines()
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    if "with left(), " in line:
        lines[number] = line.replace("left(), ", "")
    else:
        lines[number] = indent + ("if True:" if line.endswith(":") else "pass")
    return "\n".join(lines) + "\n"


class _Loader(SourceFileLoader):
    number = 0

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text(encoding="utf-8")
        return compile(left_out(text, self.number), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != f"pipeback.{self.name}":
            return None
        file = str(LIBRARY / f"{self.name}.py")
        loader = _Loader(fullname, file)
        loader.number = self.number
        return spec_from_file_location(fullname, file, loader=loader)


def leave_out(name: str, number: int) -> None:
    """Have `pipeback.<name>` lack a line in this process, which has not imported it yet."""
    sys.meta_path.insert(0, _Finder(name, number))
