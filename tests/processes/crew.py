"""Real processes that do as they are told: one process group, reused over many cases.

with Crew(4) as crew:
    results = crew.ranks(3).run(function, *arguments)      # function(*arguments) on every rank; results by rank
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import forked
from tests.laws.cases import data, network, pipeline

START: Any = forked()


class Failed(AssertionError):
    """A rank raised what nobody expected."""


class Crew:
    """Up to `most` ranks; how many there are is chosen with every call."""

    def __init__(self, most: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.size, self.rounds = 0, 0
        self.pipes: list[Any] = [None] * most
        self.members: list[Any] = [None] * most
        self.heal()

    def heal(self) -> None:
        """Start those that are not there (any more)."""
        for n, member in enumerate(self.members):
            if member is not None and member.is_alive():
                continue
            self.pipes[n], theirs = START.Pipe()
            self.members[n] = START.Process(target=_serve, args=(theirs,), daemon=True)
            self.members[n].start()
            theirs.close()
            self.size = 0

    def ranks(self, count: int) -> Crew:
        """A process group of the first `count`, where there is another one."""
        self.heal()
        if count != self.size:
            self.size, self.rounds = count, self.rounds + 1
            self.run(_join, f"{self.folder.name}/{self.rounds}", count, each=range(count))
        return self

    def again(self) -> None:
        """The next call makes a new process group: this one is broken."""
        self.size = 0

    def anew(self) -> None:
        """The next call begins with other processes: some of these are dead, or wait for those."""
        for member in self.members:
            member.kill()
            member.join()
        self.again()

    def start(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None, **named: Any
    ) -> None:
        """Have every rank begin; each: one more argument a rank, in front."""
        for rank, pipe in enumerate(self.pipes[: self.size]):
            pipe.send((function, arguments if each is None else (each[rank], *arguments), named))

    def results(self, ranks: Sequence[int] | None = None, seconds: float = 120.0) -> list[Any]:
        """What the ranks returned or raised (as exceptions), in order."""
        found, deadline = [], time.monotonic() + seconds
        for rank in range(self.size) if ranks is None else ranks:
            if not self.pipes[rank].poll(max(0.1, deadline - time.monotonic())):
                raise Failed(f"rank {rank} has not answered for {seconds} s")
            result, text = self.pipes[rank].recv()
            if text:
                result.add_note(text)
            found.append(result)
        return found

    def run(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None, **named: Any
    ) -> list[Any]:
        """Results by rank; raises where a rank did."""
        try:
            self.start(function, *arguments, each=each, **named)
            found = self.results()
        except BaseException:
            self.anew()
            raise
        raised = [(rank, result) for rank, result in enumerate(found) if isinstance(result, BaseException)]
        if raised:
            self.again()
            if function is _join:
                self.anew()
            told = (f"rank {rank}: {result!r}\n{''.join(getattr(result, '__notes__', []))}" for rank, result in raised)
            raise Failed("\n".join(told))
        return found

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for member in self.members:
            member.join(5)
            if member.is_alive():
                member.kill()
        self.folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _join(rank: int, store: str, ranks: int) -> None:
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        # one in a cycle, of a pipeline that a fault ended, would wait for its last work when it is collected: never do
        gc.freeze()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


def _train_once() -> None:
    pipe = pipeline(network(2), "pb")
    pipe.push(*data(1)[0])
    pipe.close()


def _serve(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # the first optimizer would, for seconds that a short timeout has not
    warnings.simplefilter("ignore")
    _train_once()  # likewise
    while (told := pipe.recv()) is not None:
        function, arguments, named = told
        result: Any
        text = ""
        try:
            result = function(*arguments, **named)
        except BaseException as error:
            result = error
            text = traceback.format_exc()
            gc.freeze()  # a process group with work that will never end waits for it when it is collected
        try:
            pipe.send((result, text))
        except Exception as error:
            pipe.send((Failed(f"{result!r} cannot be sent: {error}"), text))
