"""Choosing entries of a tensor: an exact number of them, the same ones on every device.

A mask is a boolean tensor, True where a weight survives. Equal scores are told apart by position: the earlier entry in
row-major order is chosen. So the same numbers give the same mask wherever it is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def survivors(density: float, size: int) -> int:
    """Weights that a tensor of `size` keeps: round(density·size), half to even, and at least one."""
    return min(size, max(1, round(density * size)))


def largest(scores: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """The mask of the `count` largest scores, which are 0 or more and not NaN, among the entries of a mask."""
    flat = scores.reshape(-1)
    if among is not None:
        flat = flat.masked_fill(~among.reshape(-1), -1)
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    edge = flat.kthvalue(flat.numel() - count + 1).values  # linear in time, where sorting is not
    if edge < 0:
        raise ValueError(f"{count} entries are to be chosen among fewer")
    chosen = flat > edge
    ties = (flat == edge).nonzero().view(-1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.view(scores.shape)


def anywhere(count: int, among: Tensor, generator: torch.Generator) -> Tensor:
    """The mask of `count` entries drawn without replacement, each equally likely, among those of a mask.

    generator: on the CPU, wherever the mask is.
    """
    places = among.reshape(-1).nonzero().view(-1)
    if count > len(places):
        raise ValueError(f"{count} entries are to be drawn among {len(places)}")
    drawn = torch.randperm(len(places), generator=generator)[:count]
    chosen = torch.zeros(among.numel(), dtype=torch.bool, device=among.device)
    chosen[places[drawn.to(places.device)]] = True
    return chosen.view(among.shape)
