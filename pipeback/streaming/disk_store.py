"""DiskStore: weights, gradients and optimizer state in files; the newest whole version survives whatever happens.

    FOLDER/lock                     held by the process that uses the folder; over processes FOLDER is a folder of the
                                    store's, rank-0, rank-1, …, and holds what this rank's store keeps
    FOLDER/stage-000.pages          regions of stage 0: see `pages`
    FOLDER/version-00000012.json    the last committed version: which region is what, its CRC-32, and plain values
    FOLDER/committed                there is, or was, such a version

A commit writes what is in flight beside what lies there already, waits for the disk, and gives its JSON the name by one
rename. Regions that a committed version names are not overwritten before the next one is committed by all ranks, so
processes that are killed at any time leave a version whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeback import errors
from pipeback.errors import StoreError
from pipeback.methods.base import Method
from pipeback.private import identity
from pipeback.schedules.programs import flush
from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.stage import Stage
from pipeback.streaming import forked, sealed_file
from pipeback.streaming.pages import Pages, Region, read
from pipeback.streaming.sparse_weights import SparseWeights
from pipeback.streaming.store import HostStore, Store

FORMAT = 1
SELDOM = 256  # micro-batches between commits of methods that never flush
SMALL = 4096  # bytes: what is smaller stays in memory, as a step counter does


class DiskStore(Store):
    """Weights, gradients and optimizer state in `folder`, read and written as stages come and go.

    folder        a folder of its own, on a local disk; one that holds a committed version of the same model is resumed,
                  over processes on as many ranks, each of which has a folder of its own there
    prefetch      stages fetched ahead of the one at work; at most prefetch + 1 have their weights on the device
    fused         use torch's fused CPU optimizers: faster, with other last bits than the default ones
    commit_every  micro-batches between commits of a method that never flushes; one that flushes commits at each flush
    device_memory, host_memory  budgets in bytes, or as "1.5 GB": see `Store`

    Raises StoreError when the folder is in use, cannot be written, is damaged, or has another format.
    """

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
        self.device_memory, self.host_memory = device_memory, host_memory
        self.budgets  # noqa: B018 (raises where they cannot be read)
        self.root = self.folder
        self.number = 0  # commits that this folder has seen
        self.committed: dict[str, Any] | None = None
        self._pages: dict[tuple[int, int], Pages] = {}  # by stage and replica
        self._housed: dict[tuple[int, int], dict[str, int]] = {}  # names of what lies in pages -> its storage
        self._depth: dict[tuple[int, int], int] = {}
        self._locks: dict[tuple[int, int], threading.RLock] = {}
        self._lock: int | None = None

    def open(self, place: int | None = None) -> None:
        """Take the folder for this process, and read what was committed."""
        _give_memory_back()
        self.closed = False
        self.folder = self.root if place is None else self.root / f"rank-{place}"
        with _naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._lock, 32, 0).decode() or "unknown"
                self.unlocked()
                raise StoreError(
                    f"{self.folder}: process {holder} uses this store; wait for it, or give another folder"
                ) from None
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            forked.locks(self)

    @property
    def versions(self) -> set[int]:
        """The numbers of the committed versions: one, or two after a kill while ranks were committing."""
        return {int(path.stem.removeprefix("version-")) for path in self.folder.glob("version-*.json")}

    @property
    def begun(self) -> tuple[bool, bool]:
        """Whether anything was committed to the folder, as it says itself; whether there are pages of stages."""
        return (self.folder / "committed").exists(), any(self.folder.glob("stage-*.pages"))

    def choose(self, number: int) -> None:
        """Go on from this version."""
        file = self._version(number)
        with _naming(file):
            document = sealed_file.unsealed(file)
        if document["format"] != FORMAT:
            raise StoreError(
                f"{file}: has format {document['format']}, this pipeback reads {FORMAT}; use the version that wrote it"
            )
        self.number, self.committed = number, document
        for other in self.versions - {number}:
            self._version(other).unlink()

    def _version(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.json"

    # -- a stage -------------------------------------------------------------------------------------------------

    def hold(self, stage: Stage, method: Method, device: torch.device, sparse: SparseWeights | None = None) -> None:
        key = _key(stage)
        self._pages[key] = Pages(self.folder / _file(*key), _regions(self._described(stage)))
        self._housed[key], self._depth[key], self._locks[key] = {}, 0, threading.RLock()
        super().hold(stage, method, device, sparse)
        self._put_away(stage, changed=True)

    @contextmanager
    def opened(self, stage: Stage, *, changes: bool = False, whole: bool = False) -> Iterator[None]:
        """Meanwhile weights, optimizer and method state are in memory (`whole`: all that lies here)."""
        key = _key(stage)
        with self._locks[key]:
            self._depth[key] += 1
            try:
                self._fetch(stage, dict(_all(stage) if whole else _base(stage)))
                yield
            except BaseException:
                self._depth[key] -= 1
                raise
            self._depth[key] -= 1
            if not self._depth[key]:
                self._put_away(stage, changed=changes)

    @contextmanager
    def lent(self, stage: Stage, tensors: Sequence[Tensor | None]) -> Iterator[None]:
        """Meanwhile these, older weights or sums, are in memory."""
        with self._locks[_key(stage)]:
            mine = {id(t) for t in tensors if t is not None}
            names = {name: t for name, t in _all(stage) if id(t) in mine}
            self._fetch(stage, names)
            yield
            self._put_away(stage, only=names)

    def put(self, stage: Stage) -> None:
        """Take in what is new of a stage: sums that left the device, shifted weights that B will need."""
        with self._locks[_key(stage)]:
            # not older weights, which an update may still have to copy there
            self._put_away(stage, only=[name for name, _ in _all(stage) if name.startswith(("grad/", "used/"))])

    def read(self, stage: Stage, slot: DeviceSlot) -> int:
        """Read the newest weights to the device. Returns the bytes that travelled to it."""
        assert stage.home is not None
        if not slot.nbytes:
            return 0
        if slot.device.type == "cpu" and stage.sparse is None and stage.shard is None:
            self._pages[_key(stage)].read("home", slot.flat.memory)
            return slot.nbytes
        with self.lent(stage, [stage.home.memory]):
            return super().read(stage, slot)

    def close(self) -> None:
        """Let the folder go; what was not committed is lost."""
        for pages in self._pages.values():
            pages.close()
        self._pages.clear()
        self.unlocked()
        self.closed = True

    def unlocked(self) -> None:
        """Let the lock go; it stays where another process has it, too."""
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
                pages.read(name, tensor)

    def _put_away(self, stage: Stage, *, changed: bool = False, only: Container[str] | None = None) -> None:
        """Write what is new, and what may have changed, and give its memory away."""
        key = _key(stage)
        housed, pages, here = self._housed[key], self._pages[key], dict(_all(stage))
        base = {name for name, _ in _base(stage)} if changed else ()
        for name, tensor in here.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes() or (only is not None and name not in only):
                continue
            if housed.get(name) != identity(storage) or name in base:
                pages.write(name, tensor)
                housed[name] = identity(storage)
            storage.resize_(0)
        for name in [name for name in housed if name not in here]:
            del housed[name]
            pages.drop(name)

    # -- versions of the whole -----------------------------------------------------------------------------------

    def begin(self, stage: Stage, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write those tensors of a stage's state that do not lie here yet; returns what the commit says of them."""
        key = _key(stage)
        housed, pages = self._housed[key], self._pages[key]
        regions = {storage: name for name, storage in housed.items()}
        described, beside = {}, set()
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            region = regions.get(identity(storage))
            if region is None:
                region = f"state/{name}"
                pages.write(region, tensor.cpu())
                beside.add(region)
            form = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]
            described[name] = [region, *form, tensor.storage_offset()]
        for name in [name for name in pages.newest if name not in housed and name not in beside]:
            pages.drop(name)
        pages.sync()
        return {"tensors": described, "regions": {name: list(region) for name, region in pages.newest.items()}}

    def finish(self, stages: dict[str, Any], state: dict[str, Any]) -> None:
        """All stages have begun: give this version its name. It is committed, and so is the one before."""
        self.number += 1
        self.committed = {"format": FORMAT, "stages": stages, "state": state}
        file = self._version(self.number)
        with _naming(file):
            draft = file.with_suffix(".partial")
            draft.write_bytes(sealed_file.sealed(self.committed))
            sealed_file.sync(draft)
            draft.rename(file)
            (self.folder / "committed").touch()
            sealed_file.sync(self.folder)

    def forget(self) -> None:
        """Every rank has this version: others are not needed any more."""
        for number in self.versions - {self.number}:
            self._version(number).unlink(missing_ok=True)
        for pages in self._pages.values():
            pages.commit()

    def state(self) -> dict[str, Any] | None:
        """The committed version, as `Pipeline.load_state_dict` takes it: tensors are read when they are asked for."""
        if self.committed is None:
            return None
        plain = self.committed["state"]["plain"]
        stages = [self._stored(s) for s in range(len(plain["stages"]))]
        return {**self.committed["state"], "stages": stages}

    def _stored(self, s: int) -> Mapping[str, Tensor]:
        parts: dict[str, tuple[Path, str, Region, list[Any]]] = {}
        for key, described in self.committed["stages"].items() if self.committed else ():
            index, replica = map(int, key.split("/"))
            if index == s:
                prefix = f"replica/{replica}/" if replica else ""
                path, regions = self.folder / _file(index, replica), _regions(described)
                for name, (region, *form) in described["tensors"].items():
                    parts[prefix + name] = path, region, regions[region], form
        return _Stored(parts)

    def lacks(self, stages: Iterable[int], replica: int) -> list[int]:
        """Those of a replica's stages that the committed version does not hold."""
        held = {} if self.committed is None else self.committed["stages"]
        return [s for s in stages if f"{s}/{replica}" not in held]

    def _described(self, stage: Stage) -> dict[str, Any]:
        if self.committed is None:
            return {}
        return self.committed["stages"].get(f"{stage.index}/{stage.replica}", {})


class _Stored(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for; the region that was read last is remembered."""

    def __init__(self, parts: dict[str, tuple[Path, str, Region, list[Any]]]) -> None:
        self._parts = parts
        self._last: tuple[Any, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        path, label, region, (dtype, shape, stride, offset) = self._parts[name]
        if self._last is None or self._last[0] != (path, label):
            self._last = (path, label), read(path, label, region)
        return self._last[1].view(getattr(torch, dtype)).as_strided(shape, stride, offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def due(method: Method, commit_every: int | None, arrived: int, flushed: bool) -> bool:
    """Whether to commit. arrived: micro-batches since the last commit. flushed: nothing is in flight."""
    flushes = (method.flush_each_push or flush(method.schedule) > 1) and not any(method.delays(2))
    if commit_every is None and flushes:
        return flushed and arrived > 0
    return arrived >= (commit_every or SELDOM)


def create(store: str | Store | None) -> Store | None:
    """The store that a pipeline was asked for; None: weights stay on the device.

    Raises ValueError saying what there is.
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
    """What an update changes: weights, optimizer and method state, each storage once."""
    assert stage.home is not None
    yield "home", stage.home.memory
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
    """Older weights and sums of gradients besides, which do not change."""
    yield from _base(stage)
    kept = {f"version/{v}": weights for v, weights in stage.versions.items()}
    kept.update({f"used/{mb}": f.owned for mb, f in stage.flights.items() if f.owned is not None})
    kept["grad"] = [g for g in stage.spilled or () if g is not None]
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


def _key(stage: Stage) -> tuple[int, int]:
    return stage.index, stage.replica


def _file(index: int, replica: int) -> str:
    return f"stage-{index:03d}{f'.replica-{replica}' if replica else ''}.pages"


def _regions(described: dict[str, Any]) -> dict[str, Region]:
    return {name: Region(*region) for name, region in described.get("regions", {}).items()}


def _give_memory_back() -> None:
    """Have the C library return blocks of a MiB and more as soon as they are freed.

    Else glibc raises this bound to what it sees freed, up to 32 MiB, and keeps the blocks of stages that have gone.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD of malloc.h


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, errors.CheckpointError) as error:
        raise StoreError(f"{path}: {error}; give a folder that can be written, or restore it from a copy") from error
