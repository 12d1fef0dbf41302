"""Meeting: how the ranks of one Trainer come together outside the pipeline.

The pipeline gives up a rank that stays in its own code for longer than the timeout. Here the others wait for such a
rank: rank 0 writes checkpoints and draws pictures while they have nothing to do. A rank that fails ends every wait.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.device_mesh import DeviceMesh

from pipeback.distributed.health.health import Health
from pipeback.tensors import accelerators

NAME = 64  # bytes of the name of a call that go before its content


def join(environment: ClusterEnvironment, device: torch.device, timeout: float) -> None:
    """Initialise torch.distributed for this rank, unless that has been done.

    timeout: seconds. Raises RuntimeError with the address of rank 0 if the ranks do not find each other.
    """
    world = environment.world_size()
    if dist.is_initialized():
        if dist.get_world_size() != world:
            raise RuntimeError(
                f"torch.distributed runs with {dist.get_world_size()} ranks, but the Trainer asks for {world}; "
                "start as many, or let the Trainer start them"
            )
        return
    address, port, rank = environment.main_address, environment.main_port, environment.global_rank()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    backend = "nccl" if accelerators.direct(device) else "gloo"
    try:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"rank {rank} of {world} did not meet the others within {timeout:g} s at MASTER_ADDR={address}, "
            f"MASTER_PORT={port}: {str(error).strip().splitlines()[0]}; check that they reach rank 0 from every host "
            "and that all ranks were started"
        ) from error
    if backend == "nccl":
        atexit.register(_end)


# Groups with work that a rank has given up. Freeing one would wait for that work for ever.
_unfinished: list[Any] = []


class Meeting:
    """All ranks of the Trainer. Every one makes the same calls in the same order.

    tensor: how many neighbouring ranks are one worker of the pipeline, and compute its stages together.
    """

    def __init__(self, device: torch.device, tensor: int = 1) -> None:
        self.rank, self.world, self.tensor = dist.get_rank(), dist.get_world_size(), tensor
        self.workers, self.shard = self.world // tensor, self.rank % tensor
        self.loss = self.rank < tensor  # whether this rank computes the loss
        self.device = device
        self.health: Health | None = None  # of the pipeline, while there is one
        self.rest: Callable[[], AbstractContextManager[Any]] = nullcontext  # around every wait
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=1000))
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks by worker and shard. Rank 0 is of the last worker, for loggers and progress bars want the loss."""
        if self._mesh is None:
            self._mesh = DeviceMesh(self.device.type, self.table if self.tensor > 1 else self.table.flatten())
        return self._mesh

    @property
    def table(self) -> torch.Tensor:
        """The ranks by worker and shard: shape (workers, tensor)."""
        return torch.arange(self.world, device="cpu").view(self.workers, self.tensor).flip(0)

    def gather(self, what: str, value: Any = None, to: int | None = None) -> list[Any]:
        """Return what every rank gives, in the order of ranks; with `to`, the other ranks get an empty list.

        what: the name of the call. Raises RuntimeError if ranks make calls of different names.
        """
        content, lengths = self._announce(what, value)
        receives, most = to in (None, self.rank), max(lengths)
        parts = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in lengths] if receives else []
        if most and to is None:
            self._wait(dist.all_gather(parts, _bytes(content, most), group=self._group, async_op=True), what)
        elif most:
            mine = _bytes(content, most)
            self._wait(dist.gather(mine, parts or None, dst=to, group=self._group, async_op=True), what)
        return [_value(part, n) for part, n in zip(parts, lengths, strict=receives)]

    def broadcast(self, what: str, value: Any, source: int = 0) -> Any:
        """Return what the rank `source` gives."""
        content, lengths = self._announce(what, value if self.rank == source else None)
        part = _bytes(content, lengths[source])
        if lengths[source]:
            self._wait(dist.broadcast(part, source, group=self._group, async_op=True), what)
        return value if self.rank == source else _value(part, lengths[source])

    def _announce(self, what: str, value: Any) -> tuple[bytes, list[int]]:
        """Check that all ranks are in this call; returns the bytes to send, and how many every rank has."""
        content = b"" if value is None else pickle.dumps(value)
        name = what.encode()[:NAME].ljust(NAME)
        heads = [torch.empty(NAME + 8, dtype=torch.uint8, device="cpu") for _ in range(self.world)]
        head = _bytes(name + len(content).to_bytes(8, "little"), NAME + 8)
        self._wait(dist.all_gather(heads, head, group=self._group, async_op=True), what)
        told = [h.numpy().tobytes() for h in heads]
        self._check([h[:NAME].decode(errors="replace").strip() for h in told])
        return content, [int.from_bytes(h[NAME:], "little") for h in told]

    def _check(self, names: list[str]) -> None:
        if len(set(names)) > 1:
            told = "; ".join(f"rank {rank} is in {name}" for rank, name in enumerate(names))
            raise RuntimeError(
                f"the ranks do not make the same calls in the same order: {told}. What a hook does on one rank alone "
                "(saving, evaluating) it must do on all: leave out `if trainer.is_global_zero`"
            )

    def _wait(self, work: Any, what: str) -> None:
        """Return when all ranks have come; meanwhile raise if the pipeline reports that a rank has failed."""
        pause = 0.0
        _unfinished.append((self._group, work))
        with self.rest(), nullcontext() if self.health is None else self.health.calling(what):
            while not work.is_completed():
                if self.health is not None:
                    self.health.check()
                time.sleep(pause)
                pause = min(pause + 0.0001, 0.01)
        _unfinished.pop()  # not where the pipeline's health raised: this work will never end
        try:
            work.wait()
        except RuntimeError as error:
            if self.health is not None:
                raise self.health.blame([r for r in range(self.world) if r != self.rank], what, 0.0) from error
            raise RuntimeError(
                f"rank {self.rank} waited for the others in {what}, and one of them has ended; its own error says why"
            ) from error


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _bytes(content: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(length)), dtype=torch.uint8) if length else torch.empty(0)


def _value(part: torch.Tensor, length: int) -> Any:
    return pickle.loads(part[:length].numpy().tobytes()) if length else None
