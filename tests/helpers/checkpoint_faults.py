"""What test_checkpoint runs in processes of its own: new processes, kills, and disks that take no more.

python -m tests.helpers.checkpoint_faults NAME FOLDER
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import pipeback
from pipeback import checkpoint, methods
from pipeback.errors import CheckpointError
from tests.laws.cases import OPTIMIZERS, data, everything, network, pipeline, sequences

METHODS = {
    "pb": {}, "pipedream": {}, "pipedream_2bw": {"micro_batches": 6}, "spectrain": {}, "cerebras": {},
    "gpipe": {"micro_batches": 4},
}  # fmt: skip


class Last(nn.Module):
    """The last output of an LSTM."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


LAYERS = {
    "dropout": lambda: [
        nn.Flatten(), nn.Sequential(nn.Linear(40, 8), nn.Dropout(0.3)), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
    ],
    "conv": lambda: [
        nn.Unflatten(1, (1, 5)), nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(160, 8)),
    ],
    "embedding": lambda: [nn.Embedding(16, 8), nn.Sequential(nn.Flatten(), nn.Linear(40, 8)), nn.Tanh()],
    "lstm": lambda: [nn.Linear(8, 8), Last(), nn.Tanh()],
}  # fmt: skip


def layered(layer: str, method: str, seed: int = 0, **options):
    """A pipeline of five stages with such layers, and 24 batches."""
    torch.manual_seed(seed)
    pipe = pipeback.Pipeline(
        nn.Sequential(*LAYERS[layer](), nn.Linear(8, 8), nn.Linear(8, 4)),
        loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["momentum"],
        method=methods.create(method, **METHODS[method]), **options,
    )  # fmt: skip
    return pipe, sequences((4,), indices=layer == "embedding")


def resume(folder: Path) -> list[str]:
    """In a new process: load what `test_resume_in_a_new_process` has saved, train on, and compare."""
    rows = []
    for path in sorted(folder.iterdir()):
        layer, method, workers = path.name.split("-")
        pipe, batches = layered(layer, method, seed=99, workers=int(workers) or None)
        facts = checkpoint.load(pipe, path)
        for x, y in batches[facts["at"] :]:
            pipe.push(x, y)
        found = everything(pipe)
        pipe.drain()
        wanted = torch.load(path / "wanted.pt")
        rows.append(f"{torch.equal(torch.cat([found, everything(pipe)]), wanted)} {path.name}")
    return rows


def kills(folder: Path, steps: int, most: int) -> str:
    """Train and save after every micro-batch; killed at any moment, and resumed from the newest whole checkpoint.

    A process that is to be killed trains at most two micro-batches and then saves the same step again and again, so
    that a fast machine is not done before all kills.
    """
    batches = data(steps)
    whole = pipeline(network(), "cerebras")
    wanted = {}
    for n, (x, y) in enumerate(batches):
        whole.push(x, y)
        wanted[n + 1] = everything(whole)
    reader = pipeline(network(seed=5), "cerebras")
    draw, killed, before, left = random.Random(3), 0, 0, set()
    while before < steps or killed < most:
        if not (child := os.fork()):
            train_and_save(folder, batches if killed == most else batches[: before + 2], ends=killed == most)
            os._exit(0)
        if killed < most:
            time.sleep(draw.uniform(0.0, 0.15))
            os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        left |= {path.suffix for path in folder.iterdir() if path.name.startswith(".")}
        path = checkpoint.latest(folder)
        if path is not None:
            checkpoint.load(reader, path)
            step = int(path.name.lstrip(".").split("-")[1].removesuffix(".replaced"))
            assert step >= before and torch.equal(everything(reader), wanted[step]), path
            before = step
        else:
            assert before == 0
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return f"killed {killed} left behind {sorted(left)} in the end {hidden}"


def train_and_save(folder: Path, batches: list, ends: bool) -> None:
    pipe = pipeline(network(seed=7), "cerebras")
    at = 0
    if (path := checkpoint.latest(folder)) is None:
        pipe = pipeline(network(), "cerebras")
    else:
        at = checkpoint.load(pipe, path)["at"]
        checkpoint.save(pipe, folder, facts={"at": at})  # the same step again
    for n in range(at, len(batches)):
        pipe.push(*batches[n])
        checkpoint.save(pipe, folder, facts={"at": n + 1}, keep=1 + n % 2)
    for _ in range(0 if ends else 10_000):
        checkpoint.save(pipe, folder, facts={"at": len(batches)})


def limit(folder: Path) -> str:
    """No file may grow beyond 4 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    return refused(folder, set_limit, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before), "File too large")


def full(folder: Path) -> str:
    """The disk is full (a small tmpfs that the caller has mounted)."""
    ballast = folder.parent / "ballast"

    def fill() -> None:
        free = shutil.disk_usage(folder).free
        ballast.write_bytes(bytes(max(0, free - 3 * 4096)))  # so that the first files still go in

    return refused(folder, fill, ballast.unlink, "No space left")


def refused(folder: Path, begin, end, cause: str) -> str:
    """A save that fails: the one before stays, nothing is left behind, and training goes on with the same bits."""
    whole, pipe = (pipeline(network(width=32), "pipedream") for _ in range(2))
    batches = data(20, width=32)
    for n, (x, y) in enumerate(batches):
        whole.push(x, y)
        pipe.push(x, y)
        if n == 9:
            first = checkpoint.save(pipe, folder)
        if n == 12:
            begin()
            try:
                checkpoint.save(pipe, folder)
            except CheckpointError as error:
                assert cause in str(error) and "rank 0 (" in str(error) and ".safetensors" in str(error), error
            else:
                raise AssertionError("the save should have failed")
            finally:
                end()
            assert [path.name for path in folder.iterdir()] == [first.name] and checkpoint.latest(folder) == first
    assert torch.equal(everything(whole), everything(pipe))
    other = pipeline(network(seed=3, width=32), "pipedream")
    checkpoint.load(other, checkpoint.save(pipe, folder))
    assert torch.equal(everything(other), everything(pipe))
    return "trained on to the same bits"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print({f.__name__: f for f in (resume, limit, full)}[sys.argv[1]](Path(sys.argv[2])))
