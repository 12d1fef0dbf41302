"""Few quotients: a sum of many quotients with denominators that are nearly equal, as a sum of a few.

    Σ_j s_j/(r + ε_j) = Σ_{k<K} S_k/(r + x_k)        S_k = Σ_j s_j·ℓ_k(ε_j)

x_k are the Chebyshev nodes of the interval in which all ε_j lie, and ℓ_k the polynomials that interpolate there. With
T_K, the Chebyshev polynomial, 1/(r + ε) is interpolated to the share T_K(e)/T_K(z) of itself, where e in [−1, 1] is the
place of ε in the interval, and z > 1 that of the pole −r, mirrored. So a quotient is right to 1/T_K(z) for all r ≥ 0,
and so is their sum, if all s_j have one sign. T_K(z) ≥ ρ^K/2 with ρ = z + √(z² − 1). (Trefethen, Approximation Theory
and Approximation Practice, 2013, chapter 8.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fewer_quotients(sizes: Tensor, tiny: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return S (K, rows) and x (K, rows), whose sum is that of s and ε (steps, rows) to the rounding of `kind`.

    sizes: s, of one sign; 0 where a row makes a step no more: the first rows make the most. tiny: ε ≥ 0. Both float64.
    They are returned as they are where so many quotients would not be fewer.
    """
    there = sizes != 0
    least = float(torch.where(there, tiny, math.inf).min()) if tiny.numel() else math.inf
    most = float(torch.where(there, tiny, -math.inf).max()) if tiny.numel() else -math.inf
    if not least <= most:  # there are no steps
        return sizes, tiny
    middle, half = (most + least) / 2, (most - least) / 2
    count = _count(middle / half, kind) if half else 1
    if count * sizes.shape[1] >= int(there.sum()):
        return sizes, tiny
    places = ((tiny - middle) / half).clamp(-1, 1).acos() if half else torch.zeros_like(tiny)
    m = torch.arange(count, dtype=torch.float64, device=sizes.device)
    moments = ((m[:, None, None] * places).cos() * sizes).sum(1)  # of T_m
    nodes = (m + 0.5) * (math.pi / count)
    shares = (nodes[:, None] * m).cos() * torch.where(m == 0, 1.0, 2.0) / count
    found = shares @ moments
    return found, (middle + half * nodes.cos())[:, None].expand_as(found)


def _count(z: float, kind: torch.dtype) -> int:
    """The number K of nodes with which 1/T_K(z) is below the rounding."""
    rounding = torch.finfo(kind).eps / 8
    return math.ceil(math.log(2 / rounding) / math.log(z + math.sqrt(z * z - 1)))
