"""Flat buffer: the weights of a stage one after the other in one run of bytes, so that they travel by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeback.tensors.layout import lines


class FlatBuffer:
    """Memory for tensors like `likes`, each at a 64-byte line and with its strides, because kernels round by place.

    The memory may be given away (`empty`) and got anew (`fill`); views and graphs that refer to it stay valid.
    """

    def __init__(self, likes: Sequence[Tensor], device: torch.device, *, pinned: bool = False, least: int = 0) -> None:
        """least: bytes, should there be more than the tensors need."""
        begins, end = places(likes)
        self.nbytes = max(end, least)
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.views = [
            self.memory[begin : begin + like.numel() * like.element_size()]
            .view(like.dtype)
            .as_strided(like.shape, dense(like))
            for begin, like in zip(begins, likes, strict=True)
        ]

    @property
    def here(self) -> bool:
        """Whether it has memory now."""
        return not self.nbytes or bool(self.memory.untyped_storage().nbytes())

    def fill(self) -> None:
        """Get memory; its content is anything."""
        self.memory.untyped_storage().resize_(self.nbytes)

    def empty(self) -> None:
        """Give the memory away: nobody may look at the views until it is there again."""
        self.memory.untyped_storage().resize_(0)


def places(likes: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins in one run of bytes, and where the run ends."""
    begins, at = [], 0
    for like in likes:
        begins.append(at)
        at += lines(like.numel() * like.element_size())
    return begins, at


def dense(like: Tensor) -> tuple[int, ...]:
    """Its strides, where they leave no gap and share no element; else those of a contiguous tensor."""
    return torch.empty_like(like, device="meta").stride()
