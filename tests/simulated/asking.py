"""A process whose accelerator is the simulated one: what `runs.py` answers."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

from tests.helpers.processes import forked
from tests.simulated.without import leave_out


class Simulated:
    """`ask` gives what differs between a run there and the same on the CPU: nothing, if all is well.

    without: the file and number of a line of the library that is left out. environment: of the process.
    """

    def __init__(self, folder: Path, without: tuple[str, int] | None = None, **environment: str) -> None:
        # what leaves a line out must not have imported the library yet
        start: Any = forked() if without is None else multiprocessing.get_context("spawn")
        self._pipe, theirs = start.Pipe()
        self._process = start.Process(target=_answering, args=(theirs, folder, without, environment), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, **run: Any) -> str:
        self.send(**run)
        return self.receive()

    def send(self, **run: Any) -> None:
        self._pipe.send(run)

    def receive(self) -> str:
        try:
            return str(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            self._process.join()
            return f"the process has ended: {self._process.exitcode}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _answering(pipe: Any, folder: Path, without: tuple[str, int] | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    if without is not None:
        leave_out(*without)
    importlib.import_module("tests.simulated.runs").answer(pipe, folder)
