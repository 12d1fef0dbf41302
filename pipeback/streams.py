"""Streams: bytes that come to a CUDA device and leave it while it computes. Elsewhere they are there at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeback.slot import Slot

Scattered = tuple[list[Tensor | None], float, int]  # see `Shard.scatter`


class Streams:
    """On CUDA: one stream brings weights, one takes gradients away, and events order them with computing."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        device = next((d for d in devices if d.type == "cuda"), None)
        self.device = device
        if device is not None:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._ready: dict[Slot, torch.cuda.Event] = {}
            self._free: dict[Slot, torch.cuda.Event] = {}

    def admitted(self, slot: Slot) -> None:
        """Its memory may still be read by what was computed before."""
        if self.device is not None:
            self._free[slot] = torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def fetching(self, slot: Slot) -> Iterator[None]:
        """What is copied to the slot goes beside what is computed, once its memory is free."""
        if self.device is None:
            yield
            return
        with torch.cuda.stream(self._in):
            if slot in self._free:
                self._in.wait_event(self._free.pop(slot))
            yield
            self._ready[slot] = self._in.record_event()

    def arrived(self, slot: Slot) -> None:
        """What is computed from now on waits for the copy."""
        if self.device is not None and slot in self._ready:
            torch.cuda.current_stream(self.device).wait_event(self._ready.pop(slot))

    def leave(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Callable[[], None]]:
        """The gradients in host memory, once the second thing returned has returned."""
        if self.device is None:
            return list(grads), lambda: None
        with torch.cuda.stream(self._out):
            self._out.wait_stream(torch.cuda.current_stream(self.device))
            host: list[Tensor | None] = []
            for g in grads:
                if g is None:
                    host.append(None)
                    continue
                copy = torch.empty_like(g, device="cpu", pin_memory=True)
                copy.copy_(g, non_blocking=True)
                g.record_stream(self._out)
                host.append(copy)
            event = self._out.record_event()
        return host, event.synchronize

    def handed(self, grads: Sequence[Tensor | None]) -> Callable[[Callable[[], Scattered]], Scattered]:
        """Another thread calls what is returned: to exchange gradients on the device, and have them in host memory."""
        ready = torch.cuda.current_stream(self.device).record_event()
        for g in grads:
            if g is not None:
                g.record_stream(self._out)

        def leave(exchange: Callable[[], Scattered]) -> Scattered:
            with torch.cuda.stream(self._out):
                self._out.wait_event(ready)
                mine, total, sent = exchange()
                host, wait = self.leave(mine)
            wait()
            return host, total, sent

        return leave
