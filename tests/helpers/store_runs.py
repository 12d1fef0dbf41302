"""What test_disk runs in processes of its own.

python -m tests.helpers.store_runs FOLDER METHOD PUSHES   trains on from wherever the folder stands, prints a digest

With RANK and WORLD_SIZE in the environment it is one of so many replicas, and pushes its part of every batch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

import pipeback
from pipeback import methods
from pipeback.streaming import disk_store
from pipeback.streaming.disk_store import DiskStore
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


def train(folder: Path, method: str, pushes: int) -> pipeback.Pipeline:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        pipeback.join()
    pipe = build(folder, method, **({"replicas": ranks} if ranks > 1 else {}))
    if pipe.arrived:
        print("resumed at", pipe.arrived, flush=True)
    for n in range(pipe.arrived // (4 // ranks), pushes):
        pipe.push(*(part.chunk(ranks)[rank] for part in batch(n)))
        print("pushed", n, flush=True)
    return pipe


if __name__ == "__main__":
    torch.set_num_threads(1)
    pipe = train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    if pipe.ranks.several:
        pipe.drain()  # graphs that were restored keep no batch statistics
    print("digest", digest(pipe), flush=True)
    pipe.close()
