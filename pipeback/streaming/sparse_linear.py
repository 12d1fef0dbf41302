"""Sparse linear: linear layers that do not compute the zeros of a sparse weight.

    y = W x + b      ∂x = Wᵀ ∂y      ∂W = ∂y xᵀ at the survivors only

The products use compressed rows (torch.sparse). They sum in another order than dense products, so the last bits differ.
If an update needs the whole gradient (RigL), that is dense. `gain` measures from which sparsity on this pays.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeback.streaming.sparse_index import scatter, unpack

ROWS = 64  # samples in the measurement of `gain`


class Pattern(NamedTuple):
    """The places of the survivors of a weight (out, in), by rows and by columns."""

    places: Tensor  # indices in the flat weight
    rows: tuple[Tensor, Tensor]  # (begin of every row, columns)
    columns: tuple[Tensor, Tensor]  # (begin of every column, rows)
    order: Tensor

    @staticmethod
    def of(index: Tensor, shape: torch.Size) -> Pattern:
        row, column = index // shape[1], index % shape[1]
        order = torch.argsort(column * shape[0] + row)
        return Pattern(index, (_begins(row, shape[0]), column), (_begins(column[order], shape[1]), row[order]), order)

    def weight(self, values: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return W and Wᵀ with these survivors."""
        return (
            _compressed(*self.rows, values, shape),
            _compressed(*self.columns, values[self.order], torch.Size(reversed(shape))),
        )


class SparseLinear:
    """Replaces the forward of an nn.Linear, whose weight has the survivors that were laid last.

    whole: whether the next update also needs the gradient of the zeros.
    """

    def __init__(self, layer: nn.Linear, whole: Callable[[], bool]) -> None:
        self.shape, self.whole = layer.weight.shape, whole
        self.laid: tuple[Tensor, Tensor] | None = None
        self.now: Pattern | None = None  # of the newest survivors, which get the gradient
        self._patterns: dict[int, tuple[Tensor, Pattern]] = {}
        parent = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                ctx.save_for_backward(x)
                y = parent.product(0, x.reshape(-1, x.shape[-1]))
                y = y if bias is None else y + bias
                return y.view(*x.shape[:-1], y.shape[-1])

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                (x,) = ctx.saved_tensors
                g, rows = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
                wanted = ctx.needs_input_grad
                return (
                    parent.product(1, g).view_as(x) if wanted[0] else None,
                    parent.gradient(g, rows) if wanted[1] else None,
                    g.sum(0) if wanted[2] else None,
                )

        self._layer, self._apply = layer, Product.apply

    def arrive(self) -> None:
        """Have the layer compute with sparse products from now on."""
        layer, apply = self._layer, self._apply
        layer.forward = lambda input: apply(input, layer.weight, layer.bias)  # type: ignore[method-assign]

    def lay(self, values: Tensor, packed: Tensor, newest: Tensor | None) -> None:
        """Make these survivors the weight. packed: the index of their places; newest: that of the newest survivors."""
        assert newest is not None
        self._patterns = {
            key: found for key, found in self._patterns.items() if found[0] is packed or found[0] is newest
        }
        self.laid = self._pattern(packed, values.device).weight(values, self.shape)
        self.now = self._pattern(newest, values.device)

    def leave(self) -> None:
        """Make the layer an ordinary one again, since its weight leaves the device."""
        self.laid = None
        self._layer.__dict__.pop("forward", None)

    def product(self, which: int, x: Tensor) -> Tensor:
        """Return x Wᵀ or x W: (N, …) -> (N, …)."""
        if self.laid is None:
            raise RuntimeError("a sparse weight is not on the device; this is a bug in pipeback")
        return (self.laid[which] @ x.t()).t().contiguous()

    def gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """Return ∂W: (out, in), zero where nothing survives."""
        if self.now is None or self.whole():
            return g.t() @ x
        begins, columns = self.now.rows
        zeros = _compressed(begins, columns, torch.zeros_like(columns, dtype=g.dtype), self.shape)
        found = torch.sparse.sampled_addmm(zeros, g.t().contiguous(), x.contiguous())
        return scatter(found.values(), self.now.places, g.new_empty(self.shape))

    def _pattern(self, packed: Tensor, device: torch.device) -> Pattern:
        found = self._patterns.get(id(packed))
        if found is None:
            found = self._patterns[id(packed)] = packed, Pattern.of(unpack(packed.to(device)), self.shape)
        return found[1]


@lru_cache(64)
def gain(shape: torch.Size, density: float, dtype: torch.dtype, device: torch.device) -> float:
    """Return how many times as fast F (forward) and B (backward) of such a linear layer are without its zeros.

    It is 0 if torch has no sparse products for this device and dtype.
    """
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], dtype=dtype, device=device)
    mask = torch.rand(shape, generator=generator) < density
    x = torch.randn(ROWS, shape[1], generator=generator).to(layer.weight).requires_grad_()

    def seconds() -> float:
        best = float("inf")
        for _ in range(4):
            begin = time.perf_counter()
            layer(x).sum().backward()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return best

    dense = seconds()
    index = mask.flatten().nonzero().flatten().to(device)
    skipping = SparseLinear(layer, lambda: False)
    pattern = Pattern.of(index, layer.weight.shape)
    try:
        skipping.arrive()
        skipping.laid = pattern.weight(layer.weight.detach().flatten()[index], layer.weight.shape)
        skipping.now = pattern
        return dense / seconds()
    except (RuntimeError, NotImplementedError):  # torch has no sparse products for this device or dtype
        return 0.0


def _compressed(begins: Tensor, places: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*[Ss]parse CSR tensor support")
        return torch.sparse_csr_tensor(begins, places, values, tuple(shape), check_invariants=False)


def _begins(numbers: Tensor, count: int) -> Tensor:
    """Return where the run of each number begins, and the end: (count + 1,)."""
    sizes = torch.bincount(numbers, minlength=count)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
