"""New processes, forked from one that has imported what they need: each is there at once."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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


def printed(code: str) -> str:
    """What Python code prints, run here: the function for `in_a_new_process`."""
    with redirect_stdout(io.StringIO()) as told:
        exec(code, {})
    return told.getvalue()


def fork_for_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts new interpreters by `spawn`, as Lightning does, gets processes that have imported what they need."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    found, like_spawned = multiprocessing.get_context, _LikeSpawned()
    for module in (multiprocessing, torch.multiprocessing):
        monkeypatch.setattr(module, "get_context", lambda way=None: like_spawned if way == "spawn" else found(way))


def launched(function: Callable[..., Any], *arguments: Any, ranks: int = 2, restarts: int = 0) -> None:
    """Call a function on ranks as torchrun starts a script, and starts it again; they have imported what they need."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, max_restarts=restarts,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="spawn",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, _same_handlers():
        fork_for_spawn(patch)
        elastic_launch(config, function)(*arguments)


@contextmanager
def _same_handlers() -> Iterator[None]:
    """A launcher leaves handlers of signals behind, which tests of signals would meet."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not signal.getsignal(number):
                signal.signal(number, handler)


class _LikeSpawned:
    """The context of `forked`, whose processes have the variables that the process has that starts them."""

    def Process(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), **named: Any) -> Any:
        return forked().Process(target=_with_variables, args=(dict(os.environ), target, *args), **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(forked(), name)


def _with_variables(variables: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*arguments)
