"""Two processes that make up a pipeline, and what they tell of one another. They are forked, which takes no imports."""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipeback
from pipeback.distributed.health.health import Health
from pipeback.distributed.health.heartbeat import host_store, join_store, my_facts
from tests.laws.cases import data

from .table import fault, layers, pipeline

SECONDS = 60.0  # that two ranks have


def _two(what: Callable[[int], Any]) -> list[Any]:
    """What each rank returns, or the error that it raises, as text."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(2):
            told, tell = os.pipe()
            child = os.fork()
            if not child:
                try:
                    torch.set_num_threads(1)
                    os.environ["LOCAL_RANK"] = str(rank)
                    dist.init_process_group(
                        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                        timeout=timedelta(seconds=SECONDS),
                    )  # fmt: skip
                    answer = what(rank)
                except BaseException as error:
                    answer = f"{type(error).__name__}: {error}"
                os.write(tell, pickle.dumps(answer))
                os.close(tell)  # the other end may go now; what this process still has to tell, it does not
                select.select([], [], [], 1.0)
                os._exit(0)
            os.close(tell)
            ends.append((child, told))
        for child, told in ends:
            ready, _, _ = select.select([told], [], [], SECONDS)
            found.append(pickle.loads(os.read(told, 1 << 20)) if ready else "nothing came from it")
            os.close(told)
            os.kill(child, 9)
            os.waitpid(child, 0)
    return found


def _alike_or_told(between: Callable[[int, pipeback.Pipeline], None]) -> None:
    """Both end with one model's weights, or both raise. between: done by each rank, after some pushes."""

    def train(rank: int) -> list[float]:
        pipe = pipeline(layers(4, 6, torch.nn.Tanh), "pb", workers=pipeback.Processes(timeout=4.0))
        for n, (x, y) in enumerate(data(16, 3)):
            if n == 8:
                between(rank, pipe)
            pipe.push(x, y)
        pipe.drain()
        return torch.cat([w.flatten() for w in pipe.model.state_dict().values()]).tolist()

    plain = pipeline(layers(4, 6, torch.nn.Tanh))
    for n, (x, y) in enumerate(data(16, 3)):
        if n == 8:
            between(1, plain)
        plain.push(x, y)
    plain.drain()
    wanted = torch.cat([w.flatten() for w in plain.model.state_dict().values()]).tolist()
    for rank, found in enumerate(_two(train)):
        assert found == wanted or isinstance(found, str), f"rank {rank} has other weights, without a word"


@fault("one of two ranks drains alone")
def _() -> None:
    _alike_or_told(lambda rank, pipe: pipe.drain() if rank == 1 else None)


@fault("one of two ranks has another rate")
def _() -> None:
    def half(rank: int, pipe: pipeback.Pipeline) -> None:
        for optimizer in pipe.optimizers if rank == 1 else ():
            optimizer.param_groups[0]["lr"] *= 0.5

    _alike_or_told(half)


def _listening(port: int) -> set[str]:
    """The addresses that something listens at on this port, as /proc writes them."""
    files = [Path(f"/proc/net/{kind}") for kind in ("tcp", "tcp6")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    return {at.rpartition(":")[0] for _, at, _, state, *_ in lines if state == "0A" and int(at[-4:], 16) == port}


@fault("on one host, the store of the ranks listens on all interfaces")
def _() -> None:
    _, address = host_store(5, near=True)
    assert _listening(int(address.rpartition(":")[2])) <= {"0100007F"}


@fault("a stranger who reaches the store of the ranks ends the run")
def _() -> None:
    store, address = host_store(5)
    health = Health(store, 0, [0], {0: my_facts()}, 1.5)
    place = address.rpartition("@")[2]
    stranger = join_store("127.0.0.1:" + place.rpartition(":")[2], 5)
    stranger.set("fault", json.dumps((0, f"made up at {socket.gethostname()}")))
    assert not health.failed.wait(1.5), "a fault that a stranger has made up is believed"
    health.leave()
