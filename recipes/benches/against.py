"""Compares this source tree with another one: the networks of a section, trained by two processes that take turns.

Each tree has a process (`side.py`), on the same interpreter and packages. They train a turn each, one after the other,
and who is first alternates. What is compared is the CPU time of the turns, since other load on the machine changes it
least.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

import pipeback
from pipeback.recipes.benches import side
from pipeback.recipes.markdown import table

Train = Callable[[Iterable[None]], None]
"""Trains a turn in the body of a loop over what it is given. It can be pickled."""
Rows = dict[tuple[str, str], Train]
"""By network and method."""
WARM = 2  # turns that do not count
START = "imports"  # the section of what happens before there is a turn: it is always compared


class Side:
    """A process on the package of `tree`. It is used in a context, at whose end it ends."""

    def __init__(self, tree: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        path = os.pathsep.join(filter(None, (str(tree), env.get("PYTHONPATH"))))
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, "-P", side.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=env | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.importing = math.nan
        """CPU seconds of the import."""

    def begin(self, train: Train) -> None:
        self._tell(pickle.dumps(train))

    def turn(self) -> list[float]:
        """Train a turn; return its CPU seconds and its seconds."""
        self._tell(side.TURN)
        return self._answer()

    def end(self) -> None:
        self._tell(side.END)

    def _tell(self, words: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words)
        self.process.stdin.flush()

    def _answer(self) -> list[float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"pipeback bench: the process of {self.tree} ended; what it printed above says why")
        found: list[float] = json.loads(line)
        return found

    def __enter__(self) -> Side:
        (self.importing,) = self._answer()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        self.process.communicate()  # it ends with its input


def main(repeats: int, sections: Mapping[str, str], path: str) -> None:
    """Print the table. sections: their files, each of which has a function `rows`; path: of the other tree."""
    before, now = Path(path).resolve(), Path(pipeback.__file__).parents[1]
    if not (before / "pipeback" / "__init__.py").is_file():
        sys.exit(
            f"pipeback bench: against={path}: there is no pipeback/__init__.py in it; give the top folder of another "
            "source tree: git worktree add --detach ../before HEAD~1 makes one for against=../before"
        )
    print(f"CPU time in the tree {path} over that in this tree, {repeats} pairs of turns per row.")
    lines, medians = [], []
    one, other = Side(before), Side(now)
    with one, other:
        for section, module in {**sections, START: START}.items():
            rows: Rows = importlib.import_module(f"pipeback.recipes.benches.{module}").rows()
            for (network, method), train in rows.items():
                cpu, seconds = paired(one, other, train, repeats)
                lines.append([section, network, method, *cells(cpu), f"{statistics.median(seconds):.3f}"])
                if section != START:
                    medians.append(statistics.median(cpu))
    lines.append([START, "", "`import pipeback`", *cells([importing(before, now) for _ in range(repeats)]), ""])
    if medians:
        lines.append(["median", f"of the rows above {START}", "", *cells(medians), ""])
    head = ["section", "network", "method", "before / now", "quartiles", "wall clock"]
    print("\n" + table(head, lines, left=(0, 1, 2)), flush=True)


def paired(before: Side, now: Side, train: Train, repeats: int) -> tuple[list[float], list[float]]:
    """Return the ratios of CPU seconds and those of seconds, one per pair of turns."""
    ratios = []
    for one in (before, now):
        one.begin(train)
    for turn in range(-WARM, repeats):
        took = {one: one.turn() for one in ((before, now) if turn % 2 else (now, before))}
        if turn >= 0:
            ratios.append([a / b for a, b in zip(took[before], took[now], strict=True)])
    for one in (before, now):
        one.end()
    cpu, seconds = map(list, zip(*ratios))
    return cpu, seconds


def importing(before: Path, now: Path) -> float:
    """The CPU seconds of `import pipeback` and its `Pipeline` beyond `import torch`, before over now."""
    one, other = Side(before), Side(now)
    with one, other:
        return one.importing / other.importing


def cells(ratios: Sequence[float]) -> tuple[str, str]:
    """The median, and the quartiles."""
    low, middle, high = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return f"{middle:.3f}", f"{low:.3f} … {high:.3f}"
