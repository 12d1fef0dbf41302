"""Forks: the processes of a command are forked from one that has imported what they need, while the command did.

Nothing here imports torch, so that both can begin their imports at once. Importing touches no GPU, which a process
could not use after a fork. Where forking is not safe, processes are new interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

IMPORTED = ["pipeback.recipes.work"]
SAFE = sys.platform == "linux"
SAFE_PATH = "PYTHONSAFEPATH"
OURS = "pipeback"  # its value if it was set here; any is as good as 1


def begin() -> None:
    """Have the imports begin, in the process that the others will be forked from."""
    if not SAFE:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    mine = SAFE_PATH not in os.environ
    os.environ.setdefault(SAFE_PATH, OURS)  # else a file in the user's folder could be imported in place of a module
    try:
        forkserver.ensure_running()
    finally:
        if mine:
            del os.environ[SAFE_PATH]


def settled() -> None:
    """Hear that the imports are done, in the process that the others are forked from."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]  # what the user's code starts has its folder again


def context() -> BaseContext:
    """How to start a process."""
    begin()
    return multiprocessing.get_context("forkserver" if SAFE else "spawn")


@contextmanager
def of_joblib() -> Iterator[None]:
    """A context in which joblib forks the processes that it starts."""
    from joblib.externals.loky.backend.context import get_context, set_start_method

    before = get_context().get_start_method()
    begin()
    set_start_method("forkserver" if SAFE else before, force=True)
    try:
        yield
    finally:
        set_start_method(before, force=True)
