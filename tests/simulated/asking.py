"""A process whose accelerator is the simulated one: what `runs.py` answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Simulated:
    """`ask` gives what differs between a run there and the same on the CPU: nothing, if all is well.

    without: the file and number of a line of the library that is left out. environment: of the process.
    """

    def __init__(self, folder: Path, without: tuple[str, int] | None = None, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated", str(folder), *map(str, without or ())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip

    def ask(self, **run: Any) -> str:
        self.send(**run)
        return self.receive()

    def send(self, **run: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return str(json.loads(line.removeprefix("answer ")))
        return f"the process has ended: {self._process.wait()}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what a process that has ended did not read any more
                pipe.close()
