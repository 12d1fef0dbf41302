"""All-gather of bytes: what each rank sends, on every rank.

`torch.distributed.all_gather_object` does the same for objects, but reads them by numpy, which torch does not need.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(sent: bytes, group: dist.ProcessGroup) -> list[memoryview]:
    """Return what all ranks of a gloo group have sent, in the order of their ranks. Every rank calls it."""
    count = dist.get_world_size(group)
    lengths = torch.empty(count, dtype=torch.int64)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(sent)]), group=group)
    own = lengths.tolist()
    most = max(max(own), 1)  # all tensors of a collective have one length, and a tensor of a buffer has some
    padded, whole = bytearray(sent.ljust(most, b"\0")), bytearray(most * count)
    received = torch.frombuffer(whole, dtype=torch.uint8).split(most)
    dist.all_gather(list(received), torch.frombuffer(padded, dtype=torch.uint8), group=group)
    view = memoryview(whole)
    return [view[rank * most : rank * most + length] for rank, length in enumerate(own)]
