"""Bandwidth: bytes per second to and from devices and files, measured in a fraction of a second, once per process.

seconds = bytes / bandwidth
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeback.private import without_step_hooks
from pipeback.stages.stage import Stage
from pipeback.streaming.pages import Pages
from pipeback.tensors import accelerators
from pipeback.tensors.flat_buffer import FlatBuffer

SIZE, FILE = 64 * 2**20, 16 * 2**20  # the bytes that a measurement moves, in memory and to a file
TIMES, SECONDS = 8, 0.1  # a measurement ends after so many tries or seconds; the fastest try counts


class Bandwidth(NamedTuple):
    """Bytes per second; inf if nothing has to move."""

    to_device: float = float("inf")
    from_device: float = float("inf")
    adding: float = float("inf")  # of gradients to sums of gradients
    handing: float = 0.0  # seconds until a job that was handed to another thread is known to be done
    disk_read: float = float("inf")
    disk_write: float = float("inf")


def measured(device: torch.device, folder: Path | None = None, size: int = 0) -> Bandwidth:
    """Measure between host memory and `device`, and between memory and files in `folder` as a disk store uses them.

    size: bytes that the folder will hold. If they fit into half of the free memory, the system's cache keeps them;
    otherwise they are read from the disk itself.
    """
    memory = *_copying(device.type, device.index), _handing()
    if folder is None:
        return Bandwidth(*memory)
    return Bandwidth(*memory, *_files(folder.resolve(), 2 * size > _left()))


def _left() -> int:
    """The bytes of free memory."""
    with suppress(OSError, StopIteration, ValueError), open("/proc/meminfo") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return 0


@cache
def _copying(kind: str, index: int | None) -> tuple[float, float, float]:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    host = torch.ones(SIZE // 4, pin_memory=accelerators.has_streams(device))
    there, place = torch.ones_like(host, device=device), FlatBuffer.like([host], device)

    def timed(once: Callable[[], object]) -> float:
        def whole() -> None:
            once()
            if kind != "cpu":
                torch.accelerator.synchronize(device)

        return SIZE / _fastest(whole)

    def arrive() -> None:
        place.empty()  # so that memory is allocated anew each time
        place.fill()
        place.views[0].copy_(host, non_blocking=True)

    # on the CPU the gradients stay where autograd has left them
    away = float("inf") if kind == "cpu" else timed(lambda: host.copy_(there, non_blocking=True))
    return timed(arrive), away, timed(lambda: there.add_(place.views[0]))


@cache
def _handing() -> float:
    with ThreadPoolExecutor(1) as other:
        return _fastest(lambda: [other.submit(int).result() for _ in range(8)]) / 8


@cache
def _files(folder: Path, through: bool) -> tuple[float, float]:
    """The bandwidths of reading and writing files. through: past the system's cache, from and to the disk itself."""
    memory = torch.ones(FILE, dtype=torch.uint8)
    number, name = tempfile.mkstemp(prefix="bandwidth-", suffix=".pages", dir=folder)
    try:
        pages = Pages(Path(name), {})

        def write() -> None:
            pages.write("probe", memory)
            if through:
                pages.sync()

        def read() -> None:
            if through and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            pages.read("probe", memory)

        try:
            write_seconds, read_seconds = _fastest(write), _fastest(read)
        finally:
            pages.close()
    finally:
        os.close(number)
        os.unlink(name)
    return FILE / read_seconds, FILE / write_seconds


def _fastest(once: Callable[[], object]) -> float:
    once()  # warms caches and pages, and loads libraries
    found: list[float] = []
    soon = time.perf_counter() + SECONDS
    while len(found) < TIMES and (not found or time.perf_counter() < soon):
        begin = time.perf_counter()
        once()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def state_sizes(stage: Stage) -> list[int]:
    """The bytes of each tensor of the stage's optimizer state, present or found by a step on tensors without memory."""
    state = stage.optimizer.state
    if not any(state.values()):
        state = _stepped(stage, lambda w: torch.empty_like(w, device="meta")).state
    by_weight = [own for own in state.values() if isinstance(own, dict)]  # beside what an optimizer counts there
    return [v.numel() * v.element_size() for own in by_weight for v in own.values() if isinstance(v, Tensor)]


def step_seconds(stage: Stage, most: int = 2**21) -> float:
    """The seconds of an optimizer step on a stage in host memory, measured on at most so many of its weights."""
    count = sum(w.numel() for w in stage.weights)
    if not count:
        return 0.0
    form = tuple((tuple(w.shape), w.dtype) for w in stage.weights), repr(stage.optimizer)
    if form not in _steps_seen:
        if count <= most:
            shadow = _stepped(stage, lambda w: torch.zeros_like(w, device="cpu"))
        else:
            shadow = _shadow(stage, [torch.zeros(most, dtype=stage.weights[0].dtype)])
        _steps_seen[form] = _fastest(shadow.step) * max(1.0, count / most) if _steps(shadow) else 0.0
    return _steps_seen[form]


_steps_seen: dict[Any, float] = {}


def _stepped(stage: Stage, like: Callable[[Tensor], Tensor]) -> torch.optim.Optimizer:
    shadow = _shadow(stage, [like(w.detach()) for w in stage.weights])
    _steps(shadow)
    return shadow


def _shadow(stage: Stage, weights: list[Tensor]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over other weights; if they are fewer, all are in the first group."""
    shadow: Any = copy.copy(stage.optimizer)
    shadow.state = defaultdict(dict)
    without_step_hooks(shadow)  # the user's hooks are for real steps
    params = [torch.nn.Parameter(w) for w in weights]
    for p in params:
        p.grad = torch.zeros_like(p)
    mine = {id(w): p for w, p in zip(stage.weights, params, strict=False)}
    shadow.param_groups = []
    for n, group in enumerate(stage.optimizer.param_groups):
        own = [mine[id(w)] for w in group["params"] if id(w) in mine] if len(mine) == len(stage.weights) else params[n:]
        same = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        if params[0].is_meta:
            same |= {k: None for k in ("fused", "foreach") if k in group}
        shadow.param_groups.append({**same, "params": own})
    made: torch.optim.Optimizer = shadow
    return made


def _steps(optimizer: torch.optim.Optimizer) -> bool:
    """Make a step; return whether this optimizer can make one on such weights."""
    try:
        with torch.no_grad():
            type(optimizer).step(optimizer)
    except Exception:  # nothing can be said before the first update
        return False
    return True
