"""DiskStore: weights, gradients and optimizer state in files. The newest committed version survives a kill at any time.

    FOLDER/lock                     held by the process that uses the folder. Over processes, FOLDER holds one folder
                                    per rank, rank-0, rank-1, …, each with the files of that rank's store
    FOLDER/stage-000.pages          regions of stage 0: see `pages`
    FOLDER/version-00000012.json    the last committed version: see `committed`

A commit writes the state of the micro-batches in flight beside the existing regions, waits for the disk, and adds a
version. Regions that a committed version names are not overwritten until all ranks have committed the next one, so a
whole version is left whenever processes are killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeback.errors import StoreError
from pipeback.methods.base import Method
from pipeback.private import identity
from pipeback.schedules.programs import flush
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.stage import Stage
from pipeback.streaming import fork_guard
from pipeback.streaming.committed import CommittedVersions, naming
from pipeback.streaming.pages import Pages
from pipeback.streaming.placeholders import Placeholders
from pipeback.streaming.sparse_weights import SparseWeights
from pipeback.streaming.store import HostStore, Store, copy_newest, move_in
from pipeback.tensors.flat_buffer import FlatBuffer

SELDOM = 256  # micro-batches between commits of methods that never flush
SMALL = 4096  # bytes: smaller tensors, such as step counters, stay in memory


class DiskStore(Store):
    """Weights, gradients and optimizer state in `folder`, read and written as stages come and go.

    folder        a folder on a local disk that nothing else uses. If it holds a committed version of the same model,
                  training resumes from it; over processes on as many ranks, each of which has a subfolder
    prefetch      stages fetched ahead of the one at work; at most prefetch + 1 stages have their weights on the device
    fused         use torch's fused CPU optimizers, which are faster and differ from the default ones in the last bits
    commit_every  micro-batches between commits, whether a method flushes or not; None: at each flush or `drain()`, and
                  every 256 micro-batches of a method that never flushes
    device_memory, host_memory  budgets in bytes, or as "1.5 GB": see `Store`

    Raises StoreError if the folder is in use, cannot be written, is damaged, or has another format.
    """

    apart = True

    def __init__(
        self,
        folder: str | Path,
        prefetch: int = 1,
        fused: bool = False,
        commit_every: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> None:
        self.folder, self.prefetch, self.fused, self.commit_every = Path(folder), prefetch, fused, commit_every
        self.folder = self.folder.absolute()  # the process may go to another folder
        self.device_memory, self.host_memory = device_memory, host_memory
        self.budgets  # noqa: B018 (it raises if they are invalid)
        self.root = self.folder
        self.versions = CommittedVersions(self.folder)
        self._pages: dict[tuple[int, int], Pages] = {}  # by stage and replica
        self._housed: dict[tuple[int, int], dict[str, int]] = {}  # name of each tensor in pages -> its storage
        self._placeholders: dict[tuple[int, int], Placeholders] = {}
        self._depth: dict[tuple[int, int], int] = {}
        self._changed: set[tuple[int, int]] = set()  # those opened now that were changed
        self._locks: dict[tuple[int, int], threading.RLock] = {}
        self._lock: int | None = None

    def open(self, place: int | None = None) -> None:
        """Lock the folder for this process."""
        if self._lock is not None:
            raise StoreError(
                f"{self.root}: this store serves a pipeline already; close that one, or give the other a store of its "
                "own, in another folder"
            )
        _give_memory_back()
        self.folder = self.root if place is None else self.root / f"rank-{place}"
        self.versions = CommittedVersions(self.folder)
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
            except BaseException as error:
                holder = os.pread(lock, 32, 0).decode() or "unknown"
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
                raise StoreError(
                    f"{self.folder}: process {holder} uses this store; wait for it, or give another folder"
                ) from None
        self._lock, self.closed = lock, False
        fork_guard.locks(self)

    # -- a stage -------------------------------------------------------------------------------------------------

    def hold(self, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None = None) -> None:
        key = _key(stage)
        self._pages[key] = Pages(self.versions.pages(*key), self.versions.regions(*key))
        self._housed[key], self._depth[key], self._locks[key] = {}, 0, threading.RLock()
        self._placeholders[key] = Placeholders()
        move_in(self, stage, method, device, sparse)
        self._put_away(stage, changed=True)

    def where(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def shown(self, home: FlatBuffer) -> None:
        """Return None, for NaN: the weights are not in memory."""

    @contextmanager
    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> Iterator[None]:
        """A context in which weights, optimizer and method state are in memory (`whole`: all tensors)."""
        key, read = _key(stage), False
        with self._locks[key]:
            self._depth[key] += 1
            try:
                self._placeholders[key].take()
                self._fetch(stage, dict(_all(stage) if whole else _base(stage)))
                read = True
                yield
            finally:  # after an error, too, as with weights in host memory
                self._depth[key] -= 1
                if changes and read:
                    self._changed.add(key)
                if not self._depth[key] and not self.closed:
                    self._put_away(stage, changed=key in self._changed)
                    self._changed.discard(key)

    @contextmanager
    def lent(self, stage: Stage, tensors: Sequence[Tensor | None]) -> Iterator[None]:
        """A context in which these tensors, older weights or sums of gradients, are in memory."""
        with self._locks[_key(stage)]:
            assert stage.home.flat is not None
            mine = {id(t) for t in tensors if t is not None}
            if id(stage.home.flat.memory) in mine:
                self._placeholders[_key(stage)].take()
            names = {name: t for name, t in _all(stage) if id(t) in mine}
            try:
                self._fetch(stage, names)
                yield
            finally:
                if not self._depth[_key(stage)] and not self.closed:  # else `opened` puts them away
                    self._put_away(stage, only=names)

    def put(self, stage: Stage) -> None:
        """Store the new tensors of a stage: gradient sums from the device, and shifted weights for the backward."""
        with self._locks[_key(stage)]:
            # older weights stay, since an update may still have to copy to them
            self._put_away(stage, only=[name for name, _ in _all(stage) if name.startswith(("grad/", "used/"))])

    def read(self, stage: Stage, slot: DeviceSlot) -> int:
        """Read the newest weights to the device and return the bytes that were copied."""
        assert stage.home.flat is not None
        if not slot.nbytes:
            return 0
        direct = slot.device.type == "cpu" and stage.home.sparse is None and stage.home.share is None
        if direct and not self._depth[_key(stage)]:  # else it may have been written, in memory
            self._pages[_key(stage)].read("home", slot.flat.memory)
            return slot.nbytes
        with self.lent(stage, [stage.home.flat.memory]):
            return copy_newest(stage, slot)

    def close(self) -> None:
        """Release the folder; changes that were not committed are lost."""
        for pages in self._pages.values():
            pages.close()
        self._pages.clear()
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for a child of fork() that has not come to `unlocked` yet
        self.unlocked()
        self.closed = True

    def unlocked(self) -> None:
        """Leave the lock; if another process also holds it, it stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes read and written since the beginning."""
        return sum(p.read_bytes for p in self._pages.values()), sum(p.written_bytes for p in self._pages.values())

    def _fetch(self, stage: Stage, tensors: dict[str, Tensor]) -> None:
        housed, pages = self._housed[_key(stage)], self._pages[_key(stage)]
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if housed.get(name) == identity(storage) and not storage.nbytes():
                storage.resize_(pages.newest[name].size)
                try:
                    pages.read(name, tensor)
                except BaseException:
                    storage.resize_(0)  # what it holds is not the tensor
                    raise

    def _put_away(self, stage: Stage, *, changed: bool = False, only: Container[str] | None = None) -> None:
        """Write new tensors, and those that may have changed, and free their memory."""
        key = _key(stage)
        housed, pages, here = self._housed[key], self._pages[key], dict(_all(stage))
        base = {name for name, _ in _base(stage)} if changed else ()
        for name, tensor in here.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes() or (only is not None and name not in only):
                continue
            if not storage.resizable():  # of a checkpoint: it lies in the buffer of a file
                tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
            if housed.get(name) != identity(storage) or name in base:
                pages.write(name, tensor)
                housed[name] = identity(storage)
            storage.resize_(0)
        for name in [name for name in housed if name not in here and name not in self._placeholders[key]]:
            del housed[name]
            pages.drop(name)
        if only is None or "home" in only:
            at_rest = {name: [tensor] for name, tensor in here.items() if name.startswith("optimizer/")}
            self._placeholders[key].put({**at_rest, "home": stage.weights})

    # -- versions ------------------------------------------------------------------------------------------------

    def begin(self, stage: Stage, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write the tensors of a stage's state that are not in its pages yet; return what the commit says of them."""
        key = _key(stage)
        housed, pages = self._housed[key], self._pages[key]
        regions = {storage: name for name, storage in housed.items()}
        described, beside = {}, set()
        for name, tensor in tensors.items():
            tensor = self._placeholders[key].behind(tensor)
            region, written = regions.get(identity(tensor.untyped_storage())), tensor
            if region is None:
                region, written = f"state/{name}", _compact(tensor)
                pages.write(region, written)
                beside.add(region)
            form = [str(written.dtype).removeprefix("torch."), list(written.shape), list(written.stride())]
            described[name] = [region, *form, written.storage_offset()]
        for name in [name for name in pages.newest if name not in housed and name not in beside]:
            pages.drop(name)
        pages.sync()
        return {"tensors": described, "regions": {name: list(region) for name, region in pages.newest.items()}}

    def finish(self, stages: dict[str, Any], state: dict[str, Any]) -> None:
        """Commit a version, after `begin` of every stage; the version before stays, too."""
        self.versions.add(stages, state)

    def forget(self) -> None:
        """Remove the other versions, since every rank has this one."""
        self.versions.forget()
        for pages in self._pages.values():
            pages.commit()


def due(method: Method, commit_every: int | None, arrived: float, flushed: bool, *, drained: bool = False) -> bool:
    """Whether to commit. arrived: micro-batches since the last commit. flushed: no micro-batch is in flight. drained:
    because the user has asked for it.
    """
    flushes = (method.flush_each_push or flush(method.schedule) > 1) and not any(method.delays(2))
    if commit_every is None and (flushes or drained):
        return flushed and arrived > 0
    return arrived >= (commit_every or SELDOM)


def create(store: str | Store | None) -> Store | None:
    """Return the store for the argument `store`; None: weights stay on the device.

    Raises ValueError, which lists the valid values.
    """
    if store is None or isinstance(store, Store):
        return store
    if store == "device":
        return None
    if store == "host":
        return HostStore()
    if store.startswith("disk:") and store != "disk:":
        return DiskStore(store.removeprefix("disk:"))
    raise ValueError(f"store={store!r} is unknown; give None, 'host', 'disk:FOLDER', or a Store with its options")


def _base(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an update changes: weights, optimizer and method state, each storage once."""
    assert stage.home.flat is not None
    yield "home", stage.home.flat.memory
    seen = set()
    for n, w in enumerate(stage.weights):
        for key, value in stage.optimizer.state.get(w, {}).items():
            if _large(value):
                seen.add(identity(value))
                yield f"optimizer/{n}/{key}", value
    for key, values in stage.state.items():
        for n, value in enumerate(values if isinstance(values, list) else ()):
            if _large(value) and identity(value) not in seen:
                seen.add(identity(value))
                yield f"method/{key}/{n}", value


def _all(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield these and all others: older weights and gradient sums, which do not change."""
    yield from _base(stage)
    kept = {f"version/{v}": weights for v, weights in stage.versions.kept.items()}
    kept.update({f"used/{mb}": f.owned for mb, f in stage.flights.items() if f.owned is not None})
    if stage.versions.due is not None and stage.versions.due.owned is not None:
        kept[f"used/{stage.versions.due.mb}"] = stage.versions.due.owned
    kept["grad"] = [g for g in stage.home.spilled or () if g is not None]
    for name, tensors in kept.items():
        for n, tensor in enumerate(tensors):
            if _large(tensor):
                yield f"{name}/{n}", tensor


def _large(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.numel() * value.element_size() >= SMALL
        and value.untyped_storage().nbytes() in (0, value.numel() * value.element_size())
    )


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor in memory of the CPU that holds no other values."""
    here = tensor.cpu()
    return here.clone() if here.untyped_storage().nbytes() > here.numel() * here.element_size() else here


def _key(stage: Stage) -> tuple[int, int]:
    return stage.index, stage.replica


def _give_memory_back() -> None:
    """Have the C library return blocks of a MiB and more as soon as they are freed.

    Otherwise glibc raises this bound to the size of freed blocks, up to 32 MiB, and keeps the memory of stages that
    have left.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD of malloc.h
