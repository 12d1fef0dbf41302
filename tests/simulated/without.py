"""The library with one line left out: what does not wait must be noticed."""

from __future__ import annotations

import re
from functools import partial

from tests.helpers.mutation import LIBRARY, change

WAITS = re.compile(r"wait_event|wait_stream|record_stream|_streams\.(given|arrived)\(|with (left|.*\bon)\(")
FILES = [
    "streaming/cuda_copies",
    "streaming/streamed_weights",
    "streaming/store_updates",
    "streaming/store",
    "stages/offload",
]


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


def leave_out(name: str, number: int) -> None:
    """Have the module `pipeback/<name>` lack a line in this process, which has not imported it yet."""
    change(name, partial(left_out, number=number))
