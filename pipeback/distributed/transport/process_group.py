"""Process group: wires over process groups, each in one direction between two ranks, first in, first out.

`GlooWire` joins any two processes, and `DirectWire` moves tensors from accelerator to accelerator; for processes of one
host there is `SharedWire` (shared_memory.py). One thread sends and one receives. Shapes may change with any message,
and a tensor has the same layout in memory at both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeback.distributed.transport.frame import SMALLEST, Reader, Writer, announce, announced
from pipeback.distributed.transport.interruptible_wait import Broken, InterruptibleWait, Pulse, unbroken
from pipeback.runtime.link import Name, Wire
from pipeback.tensors import accelerators
from pipeback.tensors.layout import Layout, Message, MessageLayout, outline_of

__all__ = ["Broken", "DirectWire", "GlooWire", "Pulse", "Wire"]

Works = list[tuple[Any, Tensor]]  # torch.distributed.Work, and the memory that it reads or fills

SMALL = 1 << 16  # bytes; a frame of this size costs little more than a smaller one


class GlooWire:
    """Frames over isend and irecv, through memory of the host.

    The receive of the next frame is always posted, with a size that both ends know. A message that does not fit, or
    that would leave most of it empty, is announced in a frame of the old size.

    group: a process group with no other traffic from one to the other. peer: global rank of the other end.
    sender: whether this end sends. bound: messages that may be unreceived before `send` waits; one more may be on its
    way. pulse: called every 0.2 s of a wait, from another thread; its error ends the wait, and with it the group.
    device: where received tensors are put. Raises Broken when the peer ends or the group's timeout has passed.
    """

    def __init__(
        self, group: Any, peer: int, *, sender: bool, bound: int, pulse: Pulse, device: torch.device | None = None
    ) -> None:
        if bound < 1:
            raise ValueError(f"bound: messages that may be unreceived, at least 1; got {bound}")
        self.group, self.peer, self.bound, self.device = group, peer, bound, device
        self._vigil = InterruptibleWait(group, peer, pulse)
        self._size = SMALLEST  # bytes of the next frame
        self._pin = accelerators.has_streams(device)  # copies to and from pinned memory are faster
        self._spare: deque[Tensor] = deque(maxlen=bound)
        self._writer, self._reader = Writer(), Reader()
        self._sent: deque[Works] = deque()  # the works of each message
        if not sender:
            self._posted = self._post(dist.irecv)

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        frame = self._writer.frame(name, message, mark)
        if len(self._sent) >= self.bound:
            # gloo reports a send as complete only after wait()
            for work, buffer in self._sent.popleft():
                self._vigil.wait(work)
                self._spare.append(buffer)
        if not self._pin:
            self._pin = any(isinstance(x, Tensor) and accelerators.has_streams(x.device) for x in _parts(message))
        works: Works = []
        size = frame.nbytes
        if not size <= self._size <= max(4 * size, SMALL):
            works.append(self._post(dist.isend, lambda buffer: announce(buffer, size)))
            self._size = size
        works.append(self._post(dist.isend, frame.write))
        self._sent.append(works)

    def recv(self) -> tuple[Name, Message, int]:
        while True:
            work, buffer = self._posted
            self._vigil.wait(work)
            if not (size := announced(buffer)):
                break
            self._size = size
            self._posted = self._post(dist.irecv)
        self._posted = self._post(dist.irecv)  # so that the next frame arrives while this one is read
        message = self._reader.read(buffer, self.device)
        self._spare.append(buffer)
        return message

    def close(self) -> None:
        """End waits. Messages that were not received are lost when this process ends; a receive may stay posted."""
        self._vigil.close()

    def _post(self, start: Callable[..., Any], fill: Callable[[Tensor], None] | None = None) -> tuple[Any, Tensor]:
        while self._spare and self._spare[0].numel() != self._size:
            self._spare.popleft()
        if self._spare:
            buffer = self._spare.popleft()
        else:
            buffer = torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        if fill is not None:
            fill(buffer)
        return unbroken(self.peer, lambda: start(buffer, self.peer, group=self.group)), buffer


class _Bounded(Wire, Protocol):
    bound: int


class DirectWire:
    """Sends tensors from device to device (NCCL), so that they do not pass through the host's memory.

    control: a wire in the same direction, for names and layouts. group: a process group in which nothing else goes
    from one to the other, and whose backend moves tensors on `device`; its timeout bounds their waits. peer: global
    rank of the other end. device: where received tensors are put; None: the current accelerator, if there is one.
    """

    def __init__(self, control: _Bounded, group: Any, peer: int, *, device: torch.device | None = None) -> None:
        self.control, self.group, self.peer, self.bound = control, group, peer, control.bound
        self.device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._last: dict[str, MessageLayout] = {}
        self._sent: deque[Works] = deque()

    def send(self, name: Name, message: Message, mark: int = 0) -> None:
        outline, text = outline_of(message), None
        if self._last.get(name[0]) != outline:
            text = torch.frombuffer(bytearray(outline.to_bytes()), dtype=torch.uint8)
            self._last[name[0]] = outline
        self.control.send(name, text, mark)
        if len(self._sent) >= self.bound:
            for work, _ in self._sent.popleft():
                unbroken(self.peer, work.wait)
        works: Works = []
        for form, tensor in zip(outline.parts, _parts(message), strict=True):
            if isinstance(form, Layout) and form.nbytes:
                run = _like(elements := form.elements(tensor)).copy_(elements)  # the sender may change its tensor
                works.append((self._start(dist.isend, run), run))
        self._sent.append(works)

    def recv(self) -> tuple[Name, Message, int]:
        name, text, mark = self.control.recv()
        if text is not None:
            self._last[name[0]] = MessageLayout.from_bytes(bytes(text.tolist()))
        outline = self._last[name[0]]
        message = outline.empty(self.device)
        for form, tensor in zip(outline.parts, _parts(message), strict=True):
            if isinstance(form, Layout) and form.nbytes:
                elements = form.elements(tensor)
                run = elements if elements.is_contiguous() else _like(elements)
                unbroken(self.peer, self._start(dist.irecv, run).wait)
                if run is not elements:
                    elements.copy_(run)
        return name, message, mark

    def close(self) -> None:
        self.control.close()

    def _start(self, start: Callable[..., Any], run: Tensor) -> Any:
        plain = run.view(-1).view(torch.uint8)  # not every backend knows every dtype
        return unbroken(self.peer, lambda: start(plain, self.peer, group=self.group))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _parts(message: Message) -> tuple[Any, ...]:
    return message if isinstance(message, tuple) else (message,)
