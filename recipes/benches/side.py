"""One side of `pipeback bench against=`: a process on the package of one source tree, which trains when it is told to.

`against.py` starts it with PYTHONPATH on the tree. Of the package it uses only what every tree has: the recipes are
those that this file stands among, and they use public names. It reads, again and again, a pickled function and then a
line per turn, up to an empty one. It answers with JSON: first with the CPU seconds of the import, then after each turn
with its CPU seconds and its seconds.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

TURN, END = b"turn\n", b"\n"


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    importlib.import_module("torch")
    begin = time.process_time()
    _ = importlib.import_module("pipeback").Pipeline
    answer(answers, time.process_time() - begin)
    adopt(Path(__file__).parents[1])
    importlib.import_module("pipeback.recipes.benches.network").settle()
    with suppress(EOFError):
        while True:
            train: Any = pickle.load(sys.stdin.buffer)
            train(turns(answers))


def adopt(recipes: Path) -> None:
    """Make this folder the package `pipeback.recipes`, whichever `pipeback` it is."""
    spec = importlib.util.spec_from_file_location(
        "pipeback.recipes", recipes / "__init__.py", submodule_search_locations=[str(recipes)]
    )
    assert spec is not None
    sys.modules["pipeback.recipes"] = importlib.util.module_from_spec(spec)


def turns(answers: TextIO) -> Iterator[None]:
    """Yield when a turn begins; what is done before the next is asked for is the turn."""
    while sys.stdin.buffer.readline() == TURN:
        gc.collect()
        seconds, cpu = time.perf_counter(), time.process_time()
        yield
        answer(answers, time.process_time() - cpu, time.perf_counter() - seconds)


def answer(answers: TextIO, *seconds: float) -> None:
    print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
