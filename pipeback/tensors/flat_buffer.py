"""Flat buffer: keeps the weights of a stage one after the other in one run of bytes, so that one copy moves all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.tensors.layout import lines


class Span(NamedTuple):
    """The place of one tensor in a run of bytes."""

    begin: int  # byte at which it begins
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]


class FlatBuffer:
    """Memory for tensors. It may be freed (`empty`) and reallocated (`fill`); views and graphs that refer to it stay
    valid.
    """

    def __init__(self, spans: Iterable[Span], nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.views = [
            self.memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).as_strided(shape, stride)
            for begin, dtype, shape, stride in spans
        ]
        self._filled: set[int] | None = None  # of a part: which parts of the memory are in use, by number
        self._number, self._whole = 0, nbytes

    @classmethod
    def like(cls, likes: Sequence[Tensor], device: torch.device, *, pinned: bool = False, least: int = 0) -> FlatBuffer:
        """Make a buffer for tensors like these, each at a multiple of 64 bytes and with its strides.

        Kernels round differently at other offsets and strides. least: the least size of the buffer in bytes.
        """
        return cls.repeated(likes, 1, device, pinned=pinned, least=least)

    @classmethod
    def repeated(
        cls, likes: Sequence[Tensor], count: int, device: torch.device, *, pinned: bool = False, least: int = 0
    ) -> FlatBuffer:
        """Make a buffer for tensors like these `count` times. least: the least size in bytes of each of these times."""
        begins, end = places(likes)
        size = max(end, least)
        spans = [
            Span(n * size + at, like.dtype, like.shape, dense(like))
            for n in range(count)
            for at, like in zip(begins, likes, strict=True)
        ]
        return cls(spans, count * size, device, pinned=pinned)

    def divided(self, count: int) -> list[FlatBuffer]:
        """Return parts of this buffer, each with as many of its tensors, which have the same shapes in every part.

        The memory is allocated when the first of the parts is filled, and freed when all are empty.
        """
        parts, size, tensors = [], self.nbytes // count, len(self.views) // count
        filled = set(range(count)) if self.here else set[int]()
        for n in range(count):
            part = FlatBuffer((), 0, self.memory.device)
            part.nbytes, part.memory = size, self.memory[n * size : (n + 1) * size]
            part.views = self.views[n * tensors : (n + 1) * tensors]
            part._filled, part._number, part._whole = filled, n, self.nbytes
            parts.append(part)
        return parts

    @property
    def here(self) -> bool:
        """Whether the memory is allocated, and a part of it in use."""
        there = not self.nbytes or bool(self.memory.untyped_storage().nbytes())
        return there and (self._filled is None or self._number in self._filled)

    def fill(self) -> None:
        """Allocate the memory; its content is undefined."""
        if not self._filled:
            self.memory.untyped_storage().resize_(self._whole)
        if self._filled is not None:
            self._filled.add(self._number)

    def empty(self) -> None:
        """Free the memory: the views must not be read until it is allocated again."""
        if self._filled is not None:
            self._filled.discard(self._number)
        if not self._filled:
            self.memory.untyped_storage().resize_(0)


def places(likes: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the byte at which each tensor begins, and the end of the run."""
    begins, at = [], 0
    for like in likes:
        begins.append(at)
        at += lines(like.numel() * like.element_size())
    return begins, at


def dense(like: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if they leave no gap and share no element, else those of a contiguous tensor."""
    return torch.empty_like(like, device="meta").stride()
