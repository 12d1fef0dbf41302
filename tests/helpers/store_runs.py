"""What the tests of the store on disk run in processes of its own, which they kill.

A process trains on from wherever the folder stands, and tells what it does, line by line, and a digest in the end. With
RANK and WORLD_SIZE in its environment it is one of so many replicas, and pushes its part of every batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
from tests.helpers.processes import forked
from tests.laws.cases import everything

WIDTH, SAMPLES = 32, 4


def model(seed: int = 0) -> nn.Sequential:
    """Dropout, batch statistics and plain layers."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def build(folder: Path | None, method: str, **options) -> pipeback.Pipeline:
    disk_store.SMALL = 1  # this model is small
    torch.manual_seed(5)
    return pipeback.Pipeline(
        model(), loss=nn.functional.mse_loss, method=methods.create(method), micro_batch_size=SAMPLES,
        optimizer=momentum if method == "cerebras" else adamw, store=folder and DiskStore(folder, commit_every=5),
        **options,
    )  # fmt: skip


def batch(n: int):
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, 4 * SAMPLES, WIDTH, generator=generator)
    return x, y


def digest(pipe: pipeback.Pipeline) -> str:
    return hashlib.sha256(everything(pipe).numpy().tobytes()).hexdigest()


def train(folder: Path, method: str, pushes: int, tell: Callable[[str], Any] = print) -> pipeback.Pipeline:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        pipeback.join()
    pipe = build(folder, method, **({"replicas": ranks} if ranks > 1 else {}))
    if pipe.arrived:
        tell(f"resumed at {pipe.arrived}")
    for n in range(pipe.arrived // (4 // ranks), pushes):
        pipe.push(*(part.chunk(ranks)[rank] for part in batch(n)))
        tell(f"pushed {n}")
    return pipe


def _run(told: Any, environment: dict[str, str], *what: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    pipe = train(*what, told.send)
    if pipe.ranks.several:
        pipe.drain()  # graphs that were restored keep no batch statistics
    told.send(f"digest {digest(pipe)}")
    pipe.close()


def start(folder: Path, method: str, pushes: int, **environment: str) -> tuple[Any, Iterator[str]]:
    """Start such a process; it and its lines, which end when it does."""
    start: Any = forked()
    ours, theirs = start.Pipe(duplex=False)
    process = start.Process(target=_run, args=(theirs, environment, folder, method, pushes), daemon=True)
    process.start()
    theirs.close()
    return process, _lines(ours)


def _lines(told: Any) -> Iterator[str]:
    with told:
        while True:
            try:
                line = told.recv()
            except EOFError:
                return
            yield line
