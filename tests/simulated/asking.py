"""A process whose accelerator is the simulated one: what `runs.py` answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Simulated:
    """`ask` gives what differs between a run there and the same on the CPU: nothing, if all is well.

    without: the file and number of a line of the library that is left out.
    """

    def __init__(self, folder: Path, without: tuple[str, int] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated", str(folder), *map(str, without or ())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, **run: Any) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return str(json.loads(line.removeprefix("answer ")))
        return f"the process has ended: {self._process.wait()}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
