"""Convolutions: writes those of one sample as products of matrices, for which a kernel of its own is often slower.

    Y = W · col(X)        ∂W = ∂Y · col(X)ᵀ        ∂X = fold(Wᵀ · ∂Y)

col(X) has a column for each place of the output, with the inputs that it sees. The gradient ∂W is one product, so that
it can be added to the momentum without being a tensor of its own. The convolutions of n stages side by side are one
convolution with n groups, and here a batch of n products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Sizes = Sequence[int]


def _fits(x: Tensor, w: Tensor, transposed: bool) -> bool:
    """Whether a convolution is of one picture and not transposed."""
    return x.dim() == w.dim() == 4 and x.shape[0] == 1 and not transposed


def _columns(x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return col(X) of every group: (groups, channels · kernel, places)."""
    _, channels, height, width = x.shape
    each = x.reshape(groups, channels // groups, height, width)
    found: Tensor = aten.im2col(each, list(w.shape[2:]), list(dilation), list(padding), list(stride))
    return found


def _product(a: Tensor, b: Tensor, *, turned: tuple[bool, bool] = (False, False)) -> Tensor:
    """Return the products (groups, …) of the matrices of each group. turned: which of the factors are transposed."""
    if len(a) > 1:
        return torch.bmm(*(m.transpose(1, 2) if turn else m for m, turn in zip((a, b), turned, strict=True)))
    one, other = (m.reshape(m.shape[1:]) for m in (a, b))  # kernels of single matrices are faster
    return torch.mm(*(m.t() if turn else m for m, turn in zip((one, other), turned, strict=True)))[None]


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool,
    output_padding: Sizes, groups: int,
) -> Any:  # fmt: skip
    """Do what aten.convolution does."""
    if not _fits(x, w, transposed):
        return NotImplemented
    columns = _columns(x, w, stride, padding, dilation, groups)
    y = _product(w.reshape(groups, w.shape[0] // groups, -1), columns)
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, w.shape[2:], stride, strict=True)
    ]
    y = y.reshape(1, w.shape[0], *size)
    return y if b is None else y + b.view(1, -1, 1, 1)


def backward(
    g: Tensor, x: Tensor, w: Tensor, bias: Sizes | None, stride: Sizes, padding: Sizes, dilation: Sizes,
    transposed: bool, output_padding: Sizes, groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Do what aten.convolution_backward does."""
    if not _fits(x, w, transposed):
        return NotImplemented
    of_groups = g.reshape(groups, w.shape[0] // groups, -1)
    gx = gw = gb = None
    if wanted[0]:
        spread = _product(w.reshape(groups, w.shape[0] // groups, -1), of_groups, turned=(True, False))
        ways = list(w.shape[2:]), list(dilation), list(padding), list(stride)
        gx = aten.col2im(spread, list(x.shape[2:]), *ways).reshape(x.shape)
    if wanted[1]:
        columns = _columns(x, w, stride, padding, dilation, groups)
        gw = _product(of_groups, columns, turned=(False, True)).reshape(w.shape)
    if wanted[2]:
        gb = g.sum((0, 2, 3))
    return gx, gw, gb


AS_PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: forward, aten.convolution_backward.default: backward
}  # fmt: skip
