"""Accelerators: devices that are not the CPU, whichever torch drives. The one module that knows them by name.

    has streams     CUDA, ROCm, XPU and devices registered through torch's interface: work is queued, ordered by events
    has none        MPS: there is one queue, and copies to the host wait

Everything goes through `torch.accelerator` and `torch.get_device_module(device)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from pipeback.private import casts_anywhere


def away(device: torch.device | None) -> bool:
    """Whether a device is an accelerator, that is, neither the CPU nor the meta device."""
    return device is not None and device.type not in ("cpu", "meta")


def kinds() -> tuple[str, ...]:
    """Return the types of the devices on which this process can compute."""
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None else ("cpu", found.type)


Autocast = tuple[tuple[str, torch.dtype], ...]  # the types of device that it is on for, and to which type it casts


def autocast() -> bool:
    """Whether this thread is inside `torch.autocast` for any of these types of device."""
    return casts_anywhere() and any(torch.is_autocast_enabled(kind) for kind in kinds())


def casting() -> Autocast:
    """Return the autocast that this thread is inside; () for none."""
    if not casts_anywhere():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind))


@contextmanager
def under(autocast: Autocast) -> Iterator[None]:
    """A context under this autocast alone.

    torch's cache of casts is empty at its start and its end: it knows weights by identity, whatever values they have.
    """
    now = casting()
    if not autocast and not now:
        yield
        return
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        for kind in {*dict(autocast), *dict(now)}:
            dtype = dict(autocast).get(kind)
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


def written(autocast: Autocast) -> list[list[str]]:
    """Return an autocast as plain values, for a saved state."""
    return [[kind, str(dtype).removeprefix("torch.")] for kind, dtype in autocast]


def read(plain: Iterable[Sequence[str]]) -> Autocast:
    """Return the autocast that `written` has written."""
    return tuple((kind, getattr(torch, dtype)) for kind, dtype in plain)


# -- streams -----------------------------------------------------------------------------------------------------------


# who multiplies float32 numbers on each type of device, and may be told to round factors to fewer bits (TF32, bfloat16)
_MULTIPLIERS: dict[str, tuple[Any, ...]] = {
    "cpu": attrgetter("matmul", "conv", "rnn")(torch.backends.mkldnn),
    "cuda": (torch.backends.cuda.matmul, *attrgetter("conv", "rnn")(torch.backends.cudnn)),
}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within this context no product of float32 numbers rounds its factors; a GPU's convolutions do by default."""
    every = [(one, one.fp32_precision) for one in _MULTIPLIERS.get(device.type, ())]
    short = [(one, value) for one, value in every if value not in ("none", "ieee")]
    for one, _ in short:
        one.fp32_precision = "ieee"
    try:
        yield
    finally:
        for one, value in short:
            one.fp32_precision = value


@cache
def _streams(kind: str) -> bool:
    try:
        torch.Stream(kind).record_event()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def has_streams(device: torch.device | None) -> bool:
    """Whether work on a device is queued in streams, so that copies through pinned memory can run beside it."""
    return device is not None and away(device) and _streams(device.type)


def current(device: torch.device) -> torch.Stream:
    """Return the current stream of this thread on a device."""
    return torch.accelerator.current_stream(device)


def in_use() -> torch.Stream | None:
    """Return the current stream of this thread on its device; None before an accelerator was used."""
    found = torch.accelerator.current_accelerator()
    if found is None or not getattr(torch.get_device_module(found), "is_initialized", bool)():
        return None
    return torch.accelerator.current_stream()


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """A context within which this thread's work goes to `stream`; other threads may use it at the same time."""
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # this sets the device, too
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


# -- random numbers ----------------------------------------------------------------------------------------------------


class _Module:
    """The random state of a device whose default generator is known to its module alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, torch.get_device_module(device)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state)


def generator(device: torch.device | None) -> Any:
    """Return the default generator of a device; None stands for the CPU."""
    if device is None or not away(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):
        return _Module(device)
    if not module.default_generators:  # CUDA has none before it is initialised
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
    """Return the random states of all accelerators by their type; nothing before one is in use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {}
    count = torch.accelerator.device_count()
    return {found.type: [generator(torch.device(found.type, n)).get_state() for n in range(count)]}


def set_random_states(saved: dict[str, Any]) -> None:
    """Set the states of `random_states`; those of a type are skipped if its number of accelerators differs."""
    for kind, now in random_states().items():
        if len(saved.get(kind, ())) == len(now):
            for n, state in enumerate(saved[kind]):
                generator(torch.device(kind, n)).set_state(state.cpu())


# -- memory ------------------------------------------------------------------------------------------------------------


def room(device: torch.device) -> int | None:
    """Return the bytes of memory of a device; None if it does not tell."""
    if not away(device):
        return None
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "total_memory", None)


# -- processes ---------------------------------------------------------------------------------------------------------


def direct(device: torch.device | None) -> bool:
    """Whether NCCL moves tensors between devices of this type, so that they do not pass through host memory."""
    return device is not None and device.type == "cuda"


def take_local(rank: int) -> str:
    """Return the backend for process groups; with NCCL, this process takes the GPU of its number on this host."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def mine() -> torch.device:
    """Return the GPU of this process, where NCCL is in use."""
    return torch.device("cuda", torch.cuda.current_device())
