"""Store: where the weights and the optimizer state of stages live.

Outside the device, a stage's weights lie in one run of bytes. What F and B run on is copied to the device for them;
gradients come back, and the optimizer makes its step on the weights in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeback.methods.base import Method
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.stage import Stage
from pipeback.streaming import byte_sizes
from pipeback.streaming.sparse_index import scatter, unpack
from pipeback.streaming.sparse_weights import SparseWeights
from pipeback.tensors import accelerators
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.weight_list import Weights


class Store:
    """The base of stores: `HostStore` and `pipeback.streaming.disk_store.DiskStore`.

    prefetch  stages fetched ahead of the one at work; at most prefetch + 1 have their weights on the device
    fused     use torch's fused CPU optimizers: faster, with other last bits than the default ones
    device_memory, host_memory  budgets in bytes, or as "1.5 GB"; training that needs more is refused before it begins,
              naming what needs it and the nearest setting that fits. None: no limit
    """

    prefetch: int = 1
    fused: bool = False
    device_memory: int | str | None = None
    host_memory: int | str | None = None

    @property
    def budgets(self) -> tuple[int | None, int | None]:
        """Bytes on the device and in host memory that training may take."""
        return byte_sizes.parsed("device_memory", self.device_memory), byte_sizes.parsed(
            "host_memory", self.host_memory
        )

    def hold(self, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None = None) -> None:
        """Become the home of a stage, which is to compute on `device`: its weights, optimizer and method state.

        sparse: chooses which of the weights survive.
        """
        if self.fused:
            _fuse(stage)  # or nothing is moved
        params = list(stage.module.parameters())
        mine = [p.detach() for p in stage.params]
        where = self.where(device)
        if sparse is not None:
            sparse.begin(mine, where)
            mine = [w for w in sparse.gathered(mine) if w is not None]
        values = iter(mine)
        likes = [next(values) if p.requires_grad else p.detach() for p in params]
        pinned, shard = accelerators.has_streams(device) and where.type == "cpu", stage.shard
        home = FlatBuffer(likes, where, pinned=pinned) if shard is None else shard.home(where, pinned=pinned)
        if shard is not None:
            likes = [shard.cut(n, p) for n, p in enumerate(likes)]
        with torch.no_grad():
            for value, view in zip(likes, home.views, strict=True):
                view.copy_(value)
        stage.sparse = sparse
        rest = self.shown(home) if sparse is None and shard is None else None
        slot = DeviceSlot(params, device, rest, 0 if shard is None else shard.nbytes)
        if sparse is not None:
            slot.skipping = sparse.skipping(stage, device)
        stage.move_home(home, slot, method)
        _follow(stage)
        for part in (sparse, shard):
            if part is not None:
                part.cut_state(stage)

    def where(self, device: torch.device) -> torch.device:
        """Where the weights of a stage that computes on `device` live."""
        return torch.device("cpu")

    def shown(self, home: FlatBuffer) -> list[torch.Tensor] | None:
        """What a stage's parameters show while they are not on the device; None: NaN."""
        return None

    @contextmanager
    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> Iterator[None]:
        """Meanwhile weights, optimizer and method state are in host memory; afterwards `changes` are kept.

        whole: older weights and sums of gradients too.
        """
        yield

    @contextmanager
    def lent(self, stage: Stage, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Meanwhile these, older weights or sums of gradients of a stage, are in host memory."""
        yield

    def put(self, stage: Stage) -> None:
        """Take in what is new of a stage: sums that left the device, shifted weights that B will need."""

    def read(self, stage: Stage, slot: DeviceSlot) -> int:
        """Copy the newest weights to the device: dense ones by one copy. Returns the bytes that travelled.

        Of weights that are split over ranks, each copies its own slice and all gather the whole.
        """
        assert stage.home is not None
        if stage.shard is not None:
            stage.shard.gather(stage.home.memory, slot.flat.memory)
            return stage.home.nbytes
        if stage.sparse is None:
            slot.flat.memory.copy_(stage.home.memory, non_blocking=True)
            return slot.nbytes
        return lay(stage, slot, stage.weights, stage.version)

    closed = False  # for good

    def open(self, place: int | None = None) -> None:
        """Called once, before the first stage is held. place: of this process among several of a pipeline."""

    def close(self) -> None:
        """Let go of files and the like."""


@dataclass
class HostStore(Store):
    """Weights, gradients and optimizer state in host memory, pinned where a stage computes on a device with streams.

    Between pushes, after `Pipeline.wait()`, the model's parameters show the weights here.
    """

    prefetch: int = 1
    fused: bool = False
    device_memory: int | str | None = None
    host_memory: int | str | None = None

    def __post_init__(self) -> None:
        self.budgets  # noqa: B018 (raises where they cannot be read)

    def shown(self, home: FlatBuffer) -> list[torch.Tensor] | None:
        return None if home.memory.is_pinned() else home.views


class DeviceStore(Store):
    """Everything stays on the device, where sparse weights are kept twice: the survivors, and dense to compute with.

    A pipeline without sparsity needs no store for this; one with sparsity and no other store has this one.
    """

    prefetch = 1 << 30  # all stages

    def where(self, device: torch.device) -> torch.device:
        return device


def lay(stage: Stage, slot: DeviceSlot, weights: Weights, version: int) -> int:
    """Copy weights to the device one by one; of sparse ones the survivors of this version, with their index.

    Returns the bytes that travelled.
    """
    assert stage.home is not None
    if stage.shard is not None:
        return _lay_slice(stage, slot, weights)
    indices = [None] * len(weights) if stage.sparse is None else stage.sparse.packed_at(version)
    given = iter(zip(range(len(weights)), weights, indices, strict=True))
    sent = 0
    for p, home, view in zip(slot.params, stage.home.views, slot.flat.views, strict=True):
        n, value, index = next(given) if p.requires_grad else (-1, home, None)
        sent += value.numel() * value.element_size()
        if index is None:
            view.copy_(value.detach(), non_blocking=True)
        else:
            sent += index.numel()
            there = value.detach().to(slot.device, non_blocking=True)
            scatter(there, unpack(index.to(slot.device, non_blocking=True)), view)
            if n in slot.skipping and stage.sparse is not None:
                slot.skipping[n].lay(there, index, stage.sparse.packed[n])
    return sent


def _lay_slice(stage: Stage, slot: DeviceSlot, weights: Weights) -> int:
    assert stage.home is not None and stage.shard is not None
    given = iter(weights)
    mine = stage.shard.home(stage.home.memory.device, pinned=stage.home.memory.is_pinned())
    for p, home, view in zip(slot.params, stage.home.views, mine.views, strict=True):
        view.copy_(next(given).detach() if p.requires_grad else home)
    stage.shard.gather(mine.memory, slot.flat.memory)
    return mine.nbytes


def _follow(stage: Stage) -> None:
    """What an optimizer has begun with, as Adagrad does, lies where its weights are; a counter stays where it was."""
    for w in stage.weights:
        for key, value in stage.optimizer.state.get(w, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.device != w.device:
                stage.optimizer.state[w][key] = value.to(w.device)


def _fuse(stage: Stage) -> None:
    kind = type(stage.optimizer)
    if "fused" not in stage.optimizer.defaults:
        raise ValueError(f"fused=True: {kind.__name__} of {stage.label} has no fused implementation; use fused=False")
    for group in stage.optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
