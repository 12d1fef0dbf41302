"""Frame: a message as one run of bytes: its name, its layout unless that is known, and its elements.

Both ends remember the last layout of every kind of message, so that most frames are a header and the elements.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.runtime.link import Name
from pipeback.tensors.layout import Message, MessageLayout, lines, outline_of

# stage, micro-batch, mark, bytes of the layout (0: it is that of the last message of this kind), bytes of the next
# frame (only in an announcement), kind
_HEADER = struct.Struct("<qqqqq8s")
SMALLEST = lines(_HEADER.size)  # the least bytes of a frame


class Frame(NamedTuple):
    name: Name
    message: Message
    mark: int
    outline: MessageLayout
    text: bytes  # the layout; empty if the other end knows it

    @property
    def nbytes(self) -> int:
        return lines(_HEADER.size + len(self.text)) + self.outline.nbytes

    def write(self, buffer: Tensor) -> None:
        """Write the frame into a flat uint8 tensor in this host's memory, of `nbytes` or more."""
        kind, stage, mb = self.name
        text = _HEADER.pack(stage, mb, self.mark, len(self.text), 0, kind.encode()) + self.text
        ctypes.memmove(buffer.data_ptr(), text, len(text))
        self.outline.pack(self.message, buffer, lines(len(text)))


class Writer:
    """Makes frames; it remembers the layouts that it has sent."""

    def __init__(self) -> None:
        self._last: dict[str, MessageLayout] = {}

    def frame(self, name: Name, message: Message, mark: int = 0) -> Frame:
        """Return the frame of a message, which must then be sent, as both ends remember the same layouts.

        Raises TypeError if the message cannot travel.
        """
        outline = outline_of(message)
        text = b""
        if self._last.get(name[0]) != outline:
            text = outline.to_bytes()
            self._last[name[0]] = outline
        return Frame(name, message, mark, outline, text)


class Reader:
    """Reads frames; it remembers the layouts that it has received."""

    def __init__(self) -> None:
        self._last: dict[str, MessageLayout] = {}

    def read(self, buffer: Tensor, device: torch.device | None = None) -> tuple[Name, Message, int]:
        """Return the name, the message, copied out of the frame, and the mark."""
        stage, mb, mark, size, _, kind = _HEADER.unpack(_start(buffer, _HEADER.size))
        name = (kind.rstrip(b"\0").decode(), stage, mb)
        if size:
            self._last[name[0]] = MessageLayout.from_bytes(_start(buffer, _HEADER.size + size)[_HEADER.size :])
        return name, self._last[name[0]].unpack(buffer, lines(_HEADER.size + size), device), mark


def announce(buffer: Tensor, nbytes: int) -> None:
    """Write a frame that only announces that the next one has `nbytes`."""
    text = _HEADER.pack(0, 0, 0, 0, nbytes, b"")
    ctypes.memmove(buffer.data_ptr(), text, len(text))


def announced(buffer: Tensor) -> int:
    """Return the bytes of the next frame if this one is an announcement, else 0."""
    return int(_HEADER.unpack(_start(buffer, _HEADER.size))[4])


def _start(buffer: Tensor, size: int) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), size)
