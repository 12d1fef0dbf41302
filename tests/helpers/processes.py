"""New processes, forked from one that has imported what they need: each is there at once."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

IMPORTED = ["torch._dynamo", "pipeback.distributed.join", "tests.laws.cases"]
LIGHTNING = "tests.lightning.ranks"


def forked() -> Any:
    """How to start them; as new interpreters where the system cannot fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *([LIGHTNING] if importlib.util.find_spec("lightning") else [])])
    return context


def in_a_new_process(function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> Any:
    """What a function returns in a process that has trained nothing yet; raises what it raises there."""
    with ProcessPoolExecutor(1, forked()) as pool:
        return pool.submit(function, *arguments).result(seconds)
