"""Measure: a run of linear layers on processes of this machine, with every operation measured, for a picture."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import pipeback
from pipeback import draw

WIDTH = 512
SAMPLES = 256  # of a micro-batch, whose operations take many times as long as a message
STREAMED = 64  # the same with a store
WARM = 3  # micro-batches before the measurement, which warm caches and allocate memory


def run(
    methods: Mapping[str, tuple[pipeback.Method, str]], ranks: int, stages: int, count: int, store: str | None = None
) -> None:
    """Train `count` micro-batches with every method and write its trace; methods: name -> (method, path).

    The processes are started as torchrun does. Raises RuntimeError with the message of the first one that fails.
    """
    if ranks == 1:
        return train(methods, stages, count, store)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="spawn",
    )  # fmt: skip
    try:
        elastic_launch(config, train)(methods, stages, count, store)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message: Any = failure.message  # @record turns the message into a dictionary
        words = message.get("message") if isinstance(message, dict) else message
        raise RuntimeError(f"rank {rank} failed: {words}") from error
    return None


@record
def train(
    methods: Mapping[str, tuple[pipeback.Method, str]], stages: int, count: int, store: str | None = None
) -> None:
    """Train on every rank, from an empty pipeline until it is empty again, so that the trace has nothing else."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = SAMPLES if store is None else STREAMED
    x, y = torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)
    for name, (method, path) in methods.items():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)])
        for _ in range(WARM):
            model(x).sum().backward()  # warm up, since the first measured times place the stages on ranks
        model.zero_grad()
        pipe = pipeback.Pipeline(
            model,
            loss=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
            method=method,
            store=store,
            micro_batch_size=None if store is None else STREAMED,
        )
        for _ in range(WARM):
            pipe.push(x, y)
        pipe.drain()
        pipe.record()
        # with a store all in one push, so that a fetched stage serves as many micro-batches as possible
        for _ in range(count if store is None else 1):
            pipe.push(*((x, y) if store is None else (x.repeat(count, 1), y.repeat(count, 1))))
        pipe.drain()
        draw.trace(pipe, path, name)
        pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
