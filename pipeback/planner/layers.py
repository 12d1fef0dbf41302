"""Layers: what one layer of a model computes, holds and sends for one sample.

A transformer block of width h, with a heads, kv of them for keys and values, and f between the products of its MLP, on
s tokens in a 16-bit type; FLOP of the forward, and bytes from the forward to the backward:

    products     2s·(2h² + 2h²·kv/a + n·h·f)              n = 2, or 3 if it is gated
    attention    4s²·h                                     of scores and of what they weigh
    kept         (8 + 2)·s·h                               inputs of two norms and two products, two dropout masks
    shared       (4 + 4kv/a)·s·h + 2·(n or 2)·s·f          by tensor parallelism: queries to the second product's input
    scores       5·a·s²                                    softmax, its dropout and mask; 2·a·s² without dropout
    parameters   2h² + 2h²·kv/a + n·h·f, biases, norms

Of n = 2, kv = a, f = 4h that is 24sh²(1 + s/6h) and sh(34 + 5as/h): Narayanan et al., arXiv 2104.04473, section 5.1;
Korthikanti et al., arXiv 2205.05198, section 4. A fused attention (FlashAttention) keeps no scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple


class Layer(NamedTuple):
    """FLOP and bytes of one sample. What tensor parallelism shares out is divided by the devices that do."""

    name: str
    parameters: float = 0.0
    products: float = 0.0  # FLOP of products with weights, forward; shared out
    attention: float = 0.0  # FLOP of products of activations, forward; shared out
    kept: float = 0.0  # bytes from F to B
    shared: float = 0.0  # bytes from F to B; shared out
    scores: float = 0.0  # bytes of attention scores from F to B; shared out, and not kept with selective recomputation
    entry: float = 0.0  # bytes of its input, which is all that is kept with full recomputation
    output: float = 0.0  # bytes to the next layer
    width: float = 1.0  # of the narrowest product; shared out
    reductions: int = 0  # all-reduces of the output, per forward and per backward, if it is shared out
    modules: int = 1  # layers with weights that it consists of, each of which launches kernels
    seconds: tuple[float, float] | None = None  # of F and B, where they were measured

    def on(self, devices: int, sequence: bool = False) -> Layer:
        """The part of one of so many devices that share it. sequence: they share out what else is kept, too."""
        if devices == 1:
            return self._replace(reductions=0)
        n = float(devices)
        return self._replace(
            parameters=self.parameters / n, products=self.products / n, attention=self.attention / n,
            kept=self.kept / n if sequence else self.kept, shared=self.shared / n, scores=self.scores / n,
            width=self.width / n, entry=self.entry / n if sequence else self.entry,
        )  # fmt: skip


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of a transformer. Raises ValueError, by name, where they contradict each other."""

    layers: int
    width: int
    heads: int
    context: int = 2048
    vocabulary: int = 51200
    inner: int = 0  # 0: 4 · width
    kv_heads: int = 0  # 0: as many as heads
    gated: bool = False
    dropout: bool = True
    positions: bool = True
    biases: bool = True
    tied: bool = True
    fused: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, but is {value!r}")
            object.__setattr__(self, name, int(value))  # of numpy, too
        if self.width % self.heads:
            divisors = [n for n in range(1, self.width + 1) if not self.width % n]
            near = min(divisors, key=lambda n: abs(n - self.heads))
            raise ValueError(f"heads={self.heads} do not divide width={self.width}; give heads={near} or another width")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} do not divide heads={self.heads}; give kv_heads={self.heads}, or a divisor"
            )

    @property
    def sequence(self) -> list[Layer]:
        """All layers, from the embedding to the head."""
        return [self._embedding(), *[self._block()] * self.layers, self._head()]

    def _embedding(self) -> Layer:
        s, h = float(self.context), float(self.width)
        rows = self.vocabulary + (self.context if self.positions else 0)
        return Layer("embedding", rows * h, kept=s * h * self.dropout, entry=8 * s, output=2 * s * h, width=h)

    def _block(self) -> Layer:
        s, h, a = float(self.context), float(self.width), float(self.heads)
        kv = (self.kv_heads or self.heads) / a
        f, n = float(self.inner or 4 * self.width), 3 if self.gated else 2
        weights = 2 * h * h * (1 + kv) + n * h * f
        biases = ((2 + 2 * kv) * h + (n - 1) * f + h if self.biases else 0.0) + (4 if self.biases else 2) * h
        return Layer(
            "block",
            weights + biases,
            products=2 * s * weights,
            attention=4 * s * s * h,
            kept=(8 + 2 * self.dropout) * s * h,
            shared=(4 + 4 * kv) * s * h + 2 * n * s * f,
            scores=0.0 if self.fused else (5 if self.dropout else 2) * a * s * s,
            entry=2 * s * h,
            output=2 * s * h,
            width=h,
            reductions=2,
            modules=4 + n,
        )

    def _head(self) -> Layer:
        """The last norm, the product with the vocabulary, and the loss; logits are kept in 32 bits."""
        s, h, v = float(self.context), float(self.width), float(self.vocabulary)
        own = 0.0 if self.tied else v * h
        norm = (2 if self.biases else 1) * h
        return Layer(
            "head", own + norm, products=2 * s * h * v, kept=4 * s * h, shared=4 * s * v,
            entry=2 * s * h, output=0.0, width=h, modules=2,
        )  # fmt: skip
