"""Eigenbasis: orthonormal bases of the rows and of the columns of a gradient, in which a second moment is kept.

    L ← β·L + (1 − β)·G·Gᵀ        R ← β·R + (1 − β)·Gᵀ·G
    Q ← the eigenvectors of L, the largest first                at first
    Q ← qr(L·Q).Q                                               later: one step of power iteration
    G̃ = Q_Lᵀ·G·Q_R                G = Q_L·G̃·Q_Rᵀ

Matrices may be batches (…, rows, columns). A side without a basis has None in its place. A side may have a basis per
block of so many rows or columns: L and Q are block-diagonal then, and kept as (…, blocks, block, block). What is not
finite, or too small for its type, leaves a basis as it was, so that a basis is always orthonormal.

Vyas et al., arXiv 2409.11321 (SOAP); Jung et al., arXiv 2602.03515 (basis rotation).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

TINY = 1e-30  # added to the diagonal, so that a matrix of zeros has eigenvectors


def exact(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """A context in which products of these tensors are not cast to a half type, though the caller may run under
    autocast.
    """
    kind = tensors[0].device.type if tensors else "cpu"
    casts = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if casts else nullcontext()


def as_matrix(x: Tensor) -> Tensor:
    """A weight or its gradient as a matrix: its first dimension by all others; the kernels of convolutions, too."""
    return x.unsqueeze(-1).flatten(1)


def blocks(length: int, block: int | None) -> int:
    """The number of bases of a side: one per block where it is a multiple of that."""
    return length // block if block and length and length % block == 0 else 1


def sides(shape: Sequence[int], largest: int, count: int = 2, block: int | None = None) -> tuple[bool, bool]:
    """Whether the rows and the columns of a weight of this shape get a basis.

    Vectors and weights without elements get none, and neither do sides longer than `largest`, but in blocks. count: 2;
    1: the shorter side alone; 0: none.
    """
    if len(shape) < 2 or 0 in shape or not count:
        return False, False
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    left, right = (1 < n // blocks(n, block) <= largest for n in (rows, columns))
    return (left, right) if count == 2 else (left and rows < columns, right and rows >= columns)


@cache
def tell_too_large(who: str, shape: tuple[int, ...], largest: int) -> None:
    """Warn that a side of a weight is too long for a basis; once for each shape."""
    warnings.warn(
        f"{who}: the weight of shape {shape} gets no basis on a side longer than {largest}, and no rotation there; "
        f"raise largest= if memory allows two square matrices of that side",
        stacklevel=2,
    )


def covariance(before: Tensor, gradient: Tensor, beta: float, *, left: bool) -> None:
    """L ← β·L + (1 − β)·G·Gᵀ in place, or R likewise, with the bits of `torch.lerp`."""
    product = gradient @ gradient.mT if left else gradient.mT @ gradient
    before.lerp_(product, 1 - beta)


def add_covariance(before: Tensor, gradient: Tensor, beta: float, *, left: bool) -> None:
    """The same in one pass through memory, which rounds otherwise."""
    if before.dim() > gradient.dim():
        part = _cut(gradient if left else gradient.mT, before)
        before.lerp_(part @ part.mT, 1 - beta)
        return
    pair = (gradient, gradient.mT) if left else (gradient.mT, gradient)
    _add_product(before, *pair, keep=beta, by=1 - beta)


def eigenvectors(covariances: Tensor, before: Tensor) -> Tensor:
    """The eigenvectors, as columns, the largest first; those of `before` where they cannot be found."""
    exact = covariances if covariances.dtype in (torch.float32, torch.float64) else covariances.float()
    size = exact.shape[-1]
    known = torch.isfinite(exact).all((-2, -1), keepdim=True)
    safe = torch.where(known, exact, 0) + TINY * torch.eye(size, dtype=exact.dtype, device=exact.device)
    try:
        _, found = torch.linalg.eigh(safe)
    except torch.linalg.LinAlgError:  # float32 does not always converge
        found = torch.linalg.eigh(safe.double())[1].to(exact.dtype)
    return _sound(found.flip(-1), before)


def iterated(covariances: Tensor, before: Tensor) -> Tensor:
    """qr(L·Q).Q: the basis after one step of power iteration; `before` itself where that is not finite."""
    exact = covariances if covariances.dtype in (torch.float32, torch.float64) else covariances.float()
    product = exact @ before.to(exact.dtype)
    if not _plainly_finite(product):
        known = torch.isfinite(product).all((-2, -1), keepdim=True)
        product = torch.where(known, product, before.to(exact.dtype))
    return _sound(torch.linalg.qr(product)[0], before)


def descending(covariances: Tensor, basis: Tensor) -> Tensor:
    """The order of the columns of a basis by QᵀLQ, the largest first."""
    return torch.argsort(((covariances @ basis) * basis).sum(-2), dim=-1, descending=True)


def _plainly_finite(x: Tensor) -> bool:
    """Whether all entries are finite, as far as one sum tells, on a CPU: elsewhere it would wait for the device."""
    return x.device.type == "cpu" and bool(x.sum().isfinite())


def _sound(found: Tensor, before: Tensor) -> Tensor:
    if _plainly_finite(found):
        return found.to(before.dtype)
    return torch.where(torch.isfinite(found).all((-2, -1), keepdim=True), found.to(before.dtype), before)


def rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Q_Lᵀ·X·Q_R."""
    x = x if left is None else _times(left.mT, x)
    if right is None:
        return x
    return x @ right if right.dim() <= x.dim() else _times(right.mT, x.mT).mT


def add_restored(into: Tensor, x: Tensor, left: Tensor | None, right: Tensor | None, *, keep: float = 1) -> None:
    """Y ← keep·Y + Q_L·X·Q_Rᵀ in place; one side at least has a basis."""
    last = left if right is None else right
    assert last is not None
    if last.dim() > x.dim():
        into.mul_(keep).add_(restored(x, left, right))
    elif right is None:
        _add_product(into, last, x, keep=keep)
    else:
        _add_product(into, x if left is None else _times(left, x), right.mT, keep=keep)


def _add_product(into: Tensor, a: Tensor, b: Tensor, *, keep: float, by: float = 1) -> None:
    """Y ← keep·Y + by·A·B in place, of matrices or of batches of them."""
    (into.addmm_ if into.dim() == 2 else into.baddbmm_)(a, b, beta=keep, alpha=by)


def restored(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Q_L·X·Q_Rᵀ."""
    return rotated(x, None if left is None else left.mT, None if right is None else right.mT)


def _times(basis: Tensor, x: Tensor) -> Tensor:
    """Q·X, where Q may be block-diagonal."""
    return basis @ x if basis.dim() <= x.dim() else (basis @ _cut(x, basis)).flatten(-3, -2)


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """(…, rows, columns) as (…, blocks, block, columns), by blocks or their bases."""
    found: Tensor = x.unflatten(-2, like.shape[-3:-1])
    return found
