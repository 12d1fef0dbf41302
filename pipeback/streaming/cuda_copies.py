"""CUDA copies: copies to and from an accelerator while it computes. On other devices it copies at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from pipeback.stages.device_slot import DeviceSlot
from pipeback.stages.stage import Stage
from pipeback.tensors import accelerators
from pipeback.tensors.accelerators import on

Scattered = tuple[list[Tensor | None], float, int]  # see `Shard.scatter`
Left = Callable[[], AbstractContextManager[None]]  # entered to read the gradients that have left


class CudaCopies:
    """Copies with two streams per device, one for weights and one for gradients; events order both with computing.

    Weights that live on the device on which they are used are copied in the stream that computes.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._beside: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}  # (in, out)
        self._stay: set[torch.device] = set()  # devices on which weights live
        self._here: dict[torch.device, torch.Stream] = {}  # the streams that compute
        for stage in stages:
            if stage.home.slot is None or stage.home.flat is None:
                continue
            device = _device(stage.home.slot)
            if stage.home.flat.memory.device == device:
                self._stay.add(device)
            elif device not in self._beside and accelerators.has_streams(device):
                self._beside[device] = torch.Stream(device), torch.Stream(device)
        self._ready: dict[DeviceSlot, torch.Event] = {}
        self._free: dict[DeviceSlot, torch.Event] = {}

    def given(self, slot: DeviceSlot) -> None:
        """Note that the slot will be overwritten, whose memory operations in the queue may still read."""
        device = _device(slot)
        if device in self._beside:
            self._free[slot] = accelerators.current(device).record_event()
        elif accelerators.has_streams(device):
            self._here[device] = accelerators.current(device)

    @contextmanager
    def fetching(self, slot: DeviceSlot) -> Iterator[None]:
        """A context in which copies to the slot run beside the computing, once the slot's memory is free."""
        device = _device(slot)
        if device not in self._beside:
            with on(self._here[device]) if device in self._here else nullcontext():
                yield
            return
        into, _ = self._beside[device]
        with on(into):
            into.wait_event(self._free.pop(slot))
            yield
            self._ready[slot] = into.record_event()

    def arrived(self, slot: DeviceSlot) -> None:
        """Have all later operations wait for the copy."""
        if slot in self._ready:
            accelerators.current(_device(slot)).wait_event(self._ready.pop(slot))

    def leave(self, grads: Sequence[Tensor | None], stages: int = 1) -> tuple[list[Tensor | None], Left]:
        """Return gradients copied to where their weights live, and a context in which they may be read.

        stages: of how many alike stages they are, one stage after the other. Rows of one tensor are copied as one.
        """
        device = next((g.device for g in grads if g is not None), None)
        if not accelerators.away(device):
            return list(grads), nullcontext
        assert device is not None
        if device in self._stay:
            here = accelerators.current(device) if accelerators.has_streams(device) else None
            return list(grads), nullcontext if here is None else lambda: on(here)
        if device not in self._beside:
            return [None if g is None else g.cpu() for g in grads], nullcontext
        _, out = self._beside[device]
        out.wait_stream(accelerators.current(device))
        with on(out):
            host: list[Tensor | None] = []
            for g in _wholes(grads, stages):
                if g is None:
                    host.append(None)
                    continue
                copy = torch.empty_like(g, device="cpu", pin_memory=True)
                copy.copy_(g, non_blocking=True)
                g.record_stream(out)
                host.append(copy)
            event = out.record_event()
        if len(host) < len(grads):
            host = [row for rows in zip(*(w.unbind() for w in host if w is not None), strict=True) for row in rows]
        return host, lambda: _after(event)

    def handed(self, grads: Sequence[Tensor | None]) -> Callable[[Callable[[], Scattered]], Scattered]:
        """Return a function for another thread, which exchanges gradients on the device and copies them to the host."""
        device = next((g.device for g in grads if g is not None), accelerators.mine())
        _, out = self._beside[device]
        ready = accelerators.current(device).record_event()
        for g in grads:
            if g is not None:
                g.record_stream(out)

        def leave(exchange: Callable[[], Scattered]) -> Scattered:
            with on(out):
                out.wait_event(ready)
                mine, total, sent = exchange()
                host, left = self.leave(mine)
            with left():
                return host, total, sent

        return leave


@contextmanager
def _after(event: torch.Event) -> Iterator[None]:
    event.synchronize()
    yield


def _wholes(grads: Sequence[Tensor | None], stages: int) -> Sequence[Tensor | None]:
    """Return tensors (n, …) whose rows the gradients of n stages are, one for each weight; else the gradients."""
    if stages == 1 or any(g is None or g.layout is not torch.strided for g in grads):
        return grads
    each, found = len(grads) // stages, []
    for n in range(each):
        rows = [g for g in grads[n::each] if g is not None]
        first, size = rows[0], rows[0].numel()
        storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
        if not all(
            g.untyped_storage().data_ptr() == storage and g.storage_offset() == begin + r * size and g.is_contiguous()
            for r, g in enumerate(rows)
        ):
            return grads
        found.append(first.as_strided((stages, *first.shape), (size, *first.stride())))
    return found


def _device(slot: DeviceSlot) -> torch.device:
    """Return the device with its number, which the user may have left out."""
    return slot.flat.memory.device
