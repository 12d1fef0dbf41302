"""Sparse index: packs the places of the survivors of a sparse tensor into few bytes, and converts their values.

    packed = header | body        all bytes; the header is two 64-bit numbers: 4·N + form, and K

    form      body                                                                  bytes     shortest at densities
    all       nothing: every weight survives                                        0         1
    bitmap    bit j of byte i: entry 8·i + j survives                               N/8       above 1/8
    bytes     dead entries before each survivor; 255: that many and no survivor     ~K        from 1/8 to about 1/400
    words     the same in 16 bits, with 65535 for 255                               ~2·K      below that

N entries, K survivors; entries are counted in row-major order whatever the strides. `pack` takes the shortest form:
with float32 values, a tensor of density 0.1 takes 0.125 of its dense bytes (0.131 with a bitmap), one of 0.01 0.013.

Numbers are in this machine's byte order. Every function works on the device of its argument; reading a header there
waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HEADER = 16  # bytes
ALL, BITMAP, BYTES, WORDS = range(4)
_CODES = {BYTES: (torch.uint8, 255), WORDS: (torch.int16, 65535)}


class Header(NamedTuple):
    form: int
    size: int  # N
    alive: int  # K


def pack(mask: Tensor) -> Tensor:
    """Return a boolean mask of any shape as a flat uint8 tensor, in the shortest form."""
    flat = mask.reshape(-1)
    index = flat.nonzero().view(-1)
    size, count = len(flat), len(index)
    if count == size:
        return _joined(ALL, size, count, index[:0].to(torch.uint8))
    dead = torch.diff(index, prepend=index.new_full((1,), -1)) - 1
    lengths = {BITMAP: -(-size // 8)}
    for form, (dtype, most) in _CODES.items():
        lengths[form] = dtype.itemsize * (count + int((dead // most).sum()))
    form = min(lengths, key=lambda form: lengths[form])
    return _joined(form, size, count, _bits(flat) if form == BITMAP else _gaps(dead, *_CODES[form]))


def header(packed: Tensor) -> Header:
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) < HEADER:
        raise ValueError(f"this is no packed index: {packed.dtype} of shape {tuple(packed.shape)}")
    first, count = packed[:HEADER].clone().view(torch.int64).tolist()
    return Header(first & 3, first >> 2, count)


def unpack(packed: Tensor) -> Tensor:
    """Return the flat index of the survivors, ascending, int64: (K,). Raises ValueError if the bytes are damaged."""
    form, size, count = header(packed)
    body = packed[HEADER:]
    if form == ALL:
        index = torch.arange(size, device=packed.device)
    elif form == BITMAP:
        bits = (body.view(-1, 1) >> torch.arange(8, device=body.device)) & 1
        index = bits.view(-1)[:size].nonzero().view(-1)
    else:
        dtype, most = _CODES[form]
        body = body[: len(body) // dtype.itemsize * dtype.itemsize]
        codes = (body.clone() if body.storage_offset() % dtype.itemsize else body).view(dtype).long() & most
        steps = (codes + 1).cumsum(0) - 1
        if len(codes) > count:  # a step of `most` entries without a survivor
            alone = codes == most
            steps = (steps - alone.cumsum(0))[~alone]
        index = steps
    if len(index) != count or (count and int(index[-1]) >= size):
        raise ValueError(f"a packed index of {count} survivors among {size} entries holds {len(index)}: it is damaged")
    return index


def unpack_mask(packed: Tensor) -> Tensor:
    """Return the flat boolean mask: (N,)."""
    mask = torch.zeros(header(packed).size, dtype=torch.bool, device=packed.device)
    mask[unpack(packed)] = True
    return mask


def nbytes(size: int, count: int) -> int:
    """Return the most bytes that `pack` can take for `count` survivors among `size` entries."""
    if count == size:
        return HEADER
    gaps = [dtype.itemsize * (count + (size - count) // most) for dtype, most in _CODES.values()]
    return HEADER + min(-(-size // 8), *gaps)


def gather(dense: Tensor, index: Tensor) -> Tensor:
    """Return the surviving values of a dense tensor of any strides: (K,)."""
    return dense.detach().reshape(-1).index_select(0, index)


def scatter(values: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, a dense tensor of any strides, with the surviving values and zeros elsewhere; returns it."""
    with torch.no_grad():
        out.zero_()
        if out.is_contiguous():
            out.view(-1).index_copy_(0, index, values)
        else:
            out.put_(index, values)
    return out


def _joined(form: int, size: int, count: int, body: Tensor) -> Tensor:
    head = torch.tensor([size << 2 | form, count], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.cat([head.to(body.device), body])


def _bits(flat: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(1, dtype=torch.uint8)


def _gaps(dead: Tensor, dtype: torch.dtype, most: int) -> Tensor:
    steps = dead // most
    codes = torch.full((len(dead) + int(steps.sum()),), most, device=dead.device)
    codes[(steps + 1).cumsum(0) - 1] = dead % most
    return codes.to(dtype).view(torch.uint8)
