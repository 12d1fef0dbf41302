"""Checksum: a number computed from tensors and plain values, by which ranks notice that these differ."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipeback.tensors.copies import pieces


def checksum(values: Sequence[Any], most: int = 1 << 20) -> int:
    """Return a checksum of shapes, dtypes and content; of tensors with more than `most` bytes it reads 16 windows."""
    crc = 0
    for value in values:
        if isinstance(value, Tensor):
            crc = zlib.crc32(_form(value.dtype, value.shape), crc)
            for piece in pieces(value):
                crc = zlib.crc32(_bytes(piece, most), crc)
        else:
            crc = zlib.crc32(repr(value).encode(), crc)
    return crc


@lru_cache(1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _bytes(tensor: Tensor, most: int) -> bytes:
    if tensor.device.type == "cpu" and tensor.nbytes <= most and tensor.is_contiguous() and tensor.numel():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    flat = tensor.detach().cpu().contiguous().flatten()
    size = flat.element_size()
    if flat.numel() * size > most:
        window, step = most // size // 16, flat.numel() // 16
        flat = torch.cat([flat[begin : begin + window] for begin in range(0, 16 * step, step)])
    return ctypes.string_at(flat.data_ptr(), flat.numel() * size) if flat.numel() else b""
