"""Accelerators: devices that are not the CPU, whichever torch drives. The one module that knows them by name.

    has streams     CUDA, ROCm, XPU and what registers itself as torch asks: work is queued and ordered by events
    has none        MPS: one queue, copies to the host wait

Everything goes through `torch.accelerator` and `torch.get_device_module(device)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist


def away(device: torch.device | None) -> bool:
    """Whether a device is an accelerator: it has values, and the CPU does not compute them."""
    return device is not None and device.type not in ("cpu", "meta")


def kinds() -> tuple[str, ...]:
    """Types of device on which something may be computed here."""
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None else ("cpu", found.type)


def autocast() -> bool:
    """Whether this thread is inside `torch.autocast` for any device that is here."""
    return any(torch.is_autocast_enabled(kind) for kind in kinds())


# -- streams -----------------------------------------------------------------------------------------------------------


@cache
def _streams(kind: str) -> bool:
    try:
        torch.Stream(kind).record_event()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def has_streams(device: torch.device | None) -> bool:
    """Whether work there is queued in streams, so that copies go beside it, through pinned memory."""
    return device is not None and away(device) and _streams(device.type)


def current(device: torch.device) -> torch.Stream:
    """The stream that this thread's work on a device goes to."""
    return torch.accelerator.current_stream(device)


def in_use() -> torch.Stream | None:
    """The stream of this thread on its device; None before anything has been done on an accelerator."""
    found = torch.accelerator.current_accelerator()
    if found is None or not getattr(torch.get_device_module(found), "is_initialized", bool)():
        return None
    return torch.accelerator.current_stream()


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """A context within which this thread's work goes to `stream`; other threads may use it at the same time."""
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # and its device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


# -- random numbers ----------------------------------------------------------------------------------------------------


class _Module:
    """The random state of a device whose default generator only its module knows."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, torch.get_device_module(device)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state)


def generator(device: torch.device | None) -> Any:
    """The generator that operators on a device draw from by default; of None, on the CPU."""
    if device is None or not away(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):
        return _Module(device)
    if not module.default_generators:  # of CUDA there are none before it is in use
        module.init()
    return module.default_generators[torch.accelerator.current_device_index() if device.index is None else device.index]


@contextmanager
def forked(devices: Iterable[torch.device | None]) -> Iterator[None]:
    """A context that restores the random state of the CPU and of these devices on exit."""
    with ExitStack() as stack:
        for one in {id(g): g for g in map(generator, (None, *devices))}.values():
            stack.callback(one.set_state, one.get_state())
        yield


def random_states() -> dict[str, list[torch.Tensor]]:
    """The random state of every accelerator, by its type; nothing before one is in use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {}
    count = torch.accelerator.device_count()
    return {found.type: [generator(torch.device(found.type, n)).get_state() for n in range(count)]}


def set_random_states(saved: dict[str, Any]) -> None:
    """Set what `random_states` gave; it is left out where there is another number of accelerators of that type."""
    for kind, now in random_states().items():
        if len(saved.get(kind, ())) == len(now):
            for n, state in enumerate(saved[kind]):
                generator(torch.device(kind, n)).set_state(state.cpu())


# -- memory ------------------------------------------------------------------------------------------------------------


def room(device: torch.device) -> int | None:
    """Bytes of memory that a device has; None where nobody says."""
    if not away(device):
        return None
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "total_memory", None)


# -- processes ---------------------------------------------------------------------------------------------------------


def direct(device: torch.device | None) -> bool:
    """Whether NCCL moves tensors between devices of this type, never through the host's memory."""
    return device is not None and device.type == "cuda"


def take_local(rank: int) -> str:
    """If NCCL is there, this process takes the GPU of its number on this host. Returns the backend to use."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def mine() -> torch.device:
    """The device of this process where NCCL is in use."""
    return torch.device("cuda", torch.cuda.current_device())
