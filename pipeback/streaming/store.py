"""Store: keeps the weights and the optimizer state of stages.

Outside the device, a stage's weights lie in one run of bytes. For a forward (F) or backward (B) the weights are copied
to the device; gradients come back, and the optimizer steps the weights in the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pipeback import byte_sizes
from pipeback.methods.base import Method
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.stage import Stage
from pipeback.streaming.sparse_index import scatter, unpack
from pipeback.streaming.sparse_weights import SparseWeights
from pipeback.tensors import accelerators
from pipeback.tensors.flat_buffer import FlatBuffer
from pipeback.tensors.weight_list import Weights


class Store(ABC):
    """The base of all stores: `HostStore`, `DeviceStore` and `pipeback.streaming.disk_store.DiskStore`.

    prefetch  stages fetched ahead of the one at work; at most prefetch + 1 stages have their weights on the device
    fused     use torch's fused CPU optimizers, which are faster and differ from the default ones in the last bits
    device_memory, host_memory  budgets in bytes, or as "1.5 GB". Training that needs more is refused before it begins,
              with the reason and the nearest setting that fits. None: no limit
    """

    prefetch: int = 1
    fused: bool = False
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    closed = False  # whether it was closed, for good
    apart = False  # whether it keeps each stage by itself, so that no copy moves several

    @property
    def budgets(self) -> tuple[int | None, int | None]:
        """The bytes that training may take on the device and in host memory; None: no limit."""
        return byte_sizes.parsed("device_memory", self.device_memory), byte_sizes.parsed(
            "host_memory", self.host_memory
        )

    @abstractmethod
    def open(self, place: int | None = None) -> None:
        """Open the store, once, before the first stage is held. place: the number of this process among several."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks."""

    @abstractmethod
    def hold(self, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None = None) -> None:
        """Take in a stage that will compute on `device`: its weights, optimizer state and method state.

        sparse: chooses which of the weights survive; None: all.
        """

    @abstractmethod
    def where(self, device: torch.device) -> torch.device:
        """Return the device on which the weights live of a stage that computes on `device`."""

    @abstractmethod
    def shown(self, home: FlatBuffer) -> list[torch.Tensor] | None:
        """Return the tensors that a stage's parameters show while they are not on the device; None: NaN."""

    @abstractmethod
    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> AbstractContextManager[None]:
        """A context in which weights, optimizer state and method state are in memory.

        changes: whether they are stored on exit. whole: older weights and gradient sums are in memory, too.
        """

    @abstractmethod
    def lent(self, stage: Stage, tensors: Sequence[torch.Tensor | None]) -> AbstractContextManager[None]:
        """A context in which these tensors, older weights or gradient sums of a stage, are in memory."""

    @abstractmethod
    def put(self, stage: Stage) -> None:
        """Store the new tensors of a stage: gradient sums from the device, and shifted weights that B needs again."""

    @abstractmethod
    def read(self, stage: Stage, slot: DeviceSlot) -> int:
        """Copy the newest weights to the device and return the bytes that were copied."""


class _MemoryStore(Store):
    """A store whose weights are always in memory."""

    def open(self, place: int | None = None) -> None:
        """Do nothing, since there is nothing to open."""

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def hold(self, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None = None) -> None:
        move_in(self, stage, method, device, sparse)

    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def lent(self, stage: Stage, tensors: Sequence[torch.Tensor | None]) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, stage: Stage) -> None:
        """Do nothing, since the tensors are there already."""

    def read(self, stage: Stage, slot: DeviceSlot) -> int:
        return copy_newest(stage, slot)


@dataclass
class HostStore(_MemoryStore):
    """Weights, gradients and optimizer state in host memory, pinned where a stage computes on a device with streams.

    Between pushes, after `Pipeline.wait()`, the model's parameters show the weights here.
    """

    prefetch: int = 1
    fused: bool = False
    device_memory: int | str | None = None
    host_memory: int | str | None = None

    def __post_init__(self) -> None:
        self.budgets  # noqa: B018 (it raises if they are invalid)

    def where(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def shown(self, home: FlatBuffer) -> list[torch.Tensor] | None:
        return None if home.memory.is_pinned() else home.views


class DeviceStore(_MemoryStore):
    """Keeps everything on the device. Sparse weights are there twice: the survivors, and a dense form to compute with.

    Only a pipeline with sparsity and no other store has this one.
    """

    prefetch = 1 << 30  # so that all stages are on the device

    def where(self, device: torch.device) -> torch.device:
        return device

    def shown(self, home: FlatBuffer) -> None:
        """Return None, for NaN: the survivors have another shape than the parameters."""


def move_in(store: Store, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None) -> None:
    """Move the weights of a stage, which will compute on `device`, into one run of bytes in the store.

    sparse: chooses which of the weights survive.
    """
    if store.fused:
        _fuse(stage)  # first, since it may raise
    params = list(stage.module.parameters())
    mine = [p.detach() for p in stage.params]
    where = store.where(device)
    if sparse is not None:
        sparse.begin(mine, where)
        mine = [w for w in sparse.gathered(mine) if w is not None]
    values = iter(mine)
    likes = [next(values) if p.requires_grad else p.detach() for p in params]
    pinned, shard = accelerators.has_streams(device) and where.type == "cpu", stage.home.share
    home = FlatBuffer.like(likes, where, pinned=pinned) if shard is None else shard.home(where, pinned=pinned)
    if shard is not None:
        likes = [shard.cut(n, p) for n, p in enumerate(likes)]
    with torch.no_grad():
        for value, view in zip(likes, home.views, strict=True):
            view.copy_(value)
    stage.home.thin(sparse)
    rest = store.shown(home) if sparse is None and shard is None else None
    slot = DeviceSlot(params, device, rest, 0 if shard is None else shard.nbytes)
    if sparse is not None:
        slot.skipping = sparse.skipping(stage, device)
    stage.move_home(home, slot, method, apart=store.apart or shard is not None)
    _follow(stage)
    for part in (sparse, shard):
        if part is not None:
            part.cut_state(stage)


def copy_newest(stage: Stage, slot: DeviceSlot) -> int:
    """Copy the newest weights from memory to the device, dense ones by one copy, and return the bytes.

    If the weights are split over ranks, each rank copies its own slice, and all ranks gather the whole.
    """
    assert stage.home.flat is not None
    if stage.home.share is not None:
        stage.home.share.gather(stage.home.flat.memory, slot.flat.memory)
        return stage.home.flat.nbytes
    if stage.home.sparse is None:
        slot.flat.memory.copy_(stage.home.flat.memory, non_blocking=True)
        return slot.nbytes
    return lay(stage, slot, stage.weights, stage.version)


def lay(stage: Stage, slot: DeviceSlot, weights: Weights, version: int) -> int:
    """Copy weights to the device one by one and return the bytes; sparse ones travel as survivors with their index."""
    assert stage.home.flat is not None
    if stage.home.share is not None:
        return _lay_slice(stage, slot, weights)
    indices = [None] * len(weights) if stage.home.sparse is None else stage.home.sparse.packed_at(version)
    given = iter(zip(range(len(weights)), weights, indices, strict=True))
    sent = 0
    for p, home, view in zip(slot.params, stage.home.flat.views, slot.flat.views, strict=True):
        n, value, index = next(given) if p.requires_grad else (-1, home, None)
        sent += value.numel() * value.element_size()
        if index is None:
            view.copy_(value.detach(), non_blocking=True)
        else:
            sent += index.numel()
            there = value.detach().to(slot.device, non_blocking=True)
            scatter(there, unpack(index.to(slot.device, non_blocking=True)), view)
            if n in slot.skipping and stage.home.sparse is not None:
                slot.skipping[n].lay(there, index, stage.home.sparse.packed[n])
    return sent


def _lay_slice(stage: Stage, slot: DeviceSlot, weights: Weights) -> int:
    assert stage.home.flat is not None and stage.home.share is not None
    given = iter(weights)
    mine: FlatBuffer = stage.home.share.home(stage.home.flat.memory.device, pinned=stage.home.flat.memory.is_pinned())
    for p, home, view in zip(slot.params, stage.home.flat.views, mine.views, strict=True):
        view.copy_(next(given).detach() if p.requires_grad else home)
    stage.home.share.gather(mine.memory, slot.flat.memory)
    return mine.nbytes


def _follow(stage: Stage) -> None:
    """Move the initial state of an optimizer, such as Adagrad's, to where its weights are; counters stay."""
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
