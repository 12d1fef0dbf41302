"""Layout: describes how a tensor lies in memory, and packs a message into one run of bytes.

Kernels round differently at other strides and at other offsets within a cache line. So a tensor that comes from another
process must lie in memory as the one that was sent does. Its layout travels with it, and only its elements are sent:
those of an expanded dimension once, the gaps of a slice not at all.
"""

from __future__ import annotations

import ctypes
import json
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

LINE = 64  # bytes: a cache line, and what the allocator of the CPU aligns to


class Layout(NamedTuple):
    """The layout of a tensor. shift: elements between the last multiple of 64 bytes and its first element."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return a new tensor of this layout with undefined values."""
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.shift + span, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.stride, self.shift)

    def elements(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor of this layout that has every element once, in the order of memory."""
        tensor = tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1)
        index, order = _walk(self.shape, self.stride)
        return tensor[index].permute(order)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        sizes = (size for size, stride in zip(self.shape, self.stride, strict=True) if stride or not size)
        return prod(sizes) * self.dtype.itemsize


def put(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a tensor of the same shape, which may be expanded, like a buffer that repeats one row."""
    if tensor.layout is torch.strided and 0 in tensor.stride():
        index = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor, value = tensor[index], value[index]
    tensor.copy_(value)


def put_back(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer an earlier value, and its size, if that has changed; graphs that saved the buffer do not see it."""
    if buffer.shape != value.shape:
        with torch.no_grad():
            buffer.resize_(value.shape)
    put(buffer.data, value)


@lru_cache(1024)
def _walk(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[Any, ...], list[int]]:
    """Return an index that takes expanded dimensions once, and the other dimensions by falling stride."""
    one = [size == 1 or not step for size, step in zip(shape, stride, strict=True)]
    steps = [step for step, single in zip(stride, one, strict=True) if not single]
    return tuple(0 if single else slice(None) for single in one), sorted(range(len(steps)), key=lambda n: -steps[n])


def form_of(tensor: Tensor) -> Layout:
    """Return the layout of a strided tensor. Raises TypeError for sparse and other tensors."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} does not travel between processes; use .to_dense()")
    shift, rest = divmod(tensor.data_ptr() % LINE, tensor.element_size())
    if rest or not tensor.numel():  # at an odd byte, which no allocation gives
        shift = 0
    return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), shift)


class MessageLayout(NamedTuple):
    """A message without the values of its tensors; None and numbers are kept as JSON (1, 1.0 and true differ)."""

    parts: tuple[Layout | str, ...]
    alone: bool  # whether the message is its only part, rather than a tuple

    def to_bytes(self) -> bytes:
        parts = [part if isinstance(part, str) else [str(part.dtype)[6:], *part[1:]] for part in self.parts]
        return json.dumps([self.alone, parts]).encode()

    @staticmethod
    def from_bytes(text: bytes) -> MessageLayout:
        alone, parts = json.loads(text)
        return MessageLayout(tuple(part if isinstance(part, str) else _form(*part) for part in parts), alone)

    @property
    def nbytes(self) -> int:
        """The bytes that `pack` fills; every tensor begins at a multiple of 64."""
        return _places(self)[1]

    def pack(self, message: Message, buffer: Tensor, start: int = 0) -> None:
        """Copy the elements of a message with this layout to the bytes of `buffer` that begin at `start`.

        buffer: a flat uint8 tensor in this host's memory, with at least `nbytes` bytes from `start` on.
        """
        for tensor, form, at, size in self._tensors(message):
            at += start
            if _plain(tensor):
                ctypes.memmove(buffer.data_ptr() + at, tensor.data_ptr(), size)
            else:
                elements = form.elements(tensor)
                buffer[at : at + size].view(form.dtype).view(elements.shape).copy_(elements)

    def unpack(self, buffer: Tensor, start: int = 0, device: torch.device | None = None) -> Message:
        """Return the message, with new tensors on `device` (None: in this host's memory)."""
        message = self.empty(device)
        for tensor, form, at, size in self._tensors(message):
            at += start
            if _plain(tensor):
                ctypes.memmove(tensor.data_ptr(), buffer.data_ptr() + at, size)
            else:
                elements = form.elements(tensor)
                elements.copy_(buffer[at : at + size].view(form.dtype).view(elements.shape))
        return message

    def _tensors(self, message: Message) -> list[tuple[Tensor, Layout, int, int]]:
        """Return the tensors that have elements, each with its layout, its first byte and its bytes."""
        parts = (message,) if self.alone else message
        return [(parts[n], form, at, size) for n, form, at, size in _places(self)[0]]

    def empty(self, device: torch.device | None = None) -> Message:
        """Return the message with new tensors, whose values are undefined."""
        parts = tuple(json.loads(part) if isinstance(part, str) else part.empty(device) for part in self.parts)
        return parts[0] if self.alone else parts


@lru_cache(1024)
def _places(outline: MessageLayout) -> tuple[list[tuple[int, Layout, int, int]], int]:
    """Return (part, layout, begin, bytes) of every tensor that has elements, and the bytes of all."""
    places, at = [], 0
    for n, form in enumerate(outline.parts):
        if isinstance(form, Layout) and form.nbytes:
            places.append((n, form, at, form.nbytes))
            at += lines(form.nbytes)
    return places, at


def outline_of(message: Message) -> MessageLayout:
    """Return the layout of a message. Raises TypeError if it has more than tensors, numbers and Nones in it."""
    alone = not isinstance(message, tuple)
    return MessageLayout(tuple(_part(part) for part in ((message,) if alone else message)), alone)


def _part(part: Any) -> Layout | str:
    if isinstance(part, Tensor):
        return form_of(part)
    if part is None or isinstance(part, (bool, int, float)):
        return json.dumps(part)
    raise TypeError(
        f"a {type(part).__name__} cannot travel between stages; send a tensor, or a tuple of tensors, numbers and Nones"
    )


def _form(dtype: str, shape: list[int], stride: list[int], shift: int) -> Layout:
    return Layout(getattr(torch, dtype), tuple(shape), tuple(stride), shift)


def _plain(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are its elements in order, so that a small one is copied in one call."""
    return tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())


def lines(size: int) -> int:
    """Return `size` bytes rounded up to whole cache lines."""
    return -(-size // LINE) * LINE


Message = Any  # a tensor, or a tuple of tensors and Nones
