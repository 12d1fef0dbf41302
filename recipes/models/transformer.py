"""Transformer: a decoder-only transformer with one block per stage."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from pipeback.recipes.models.facts import takes


class Embedding(nn.Module):
    """Tokens (B, T) -> token + learned position (B, T, width), T at most `context`."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """x + attention(norm(x)), causal: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.size, self.dropout = width // heads, dropout  # numbers per head
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropped(self.out(self.attend(self.norm(x))), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, 3, -1, self.size)  # under tensor parallelism, this rank's heads
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Feedforward(nn.Module):
    """x + mlp(norm(x)), whose hidden layer is four times as wide: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropped(self.down(nn.functional.gelu(self.up(self.norm(x)))), self.dropout, self.training)


def dropped(x: Tensor, share: float, training: bool) -> Tensor:
    return dropout(x, share, training) if share else x


class Block(nn.Module):
    """Attention, then a feedforward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feedforward = Feedforward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.feedforward(self.attention(x))


@takes("vocabulary")
def transformer(
    vocabulary: int,
    context: int,
    outputs: int | None = None,
    width: int = 128,
    depth: int = 6,
    heads: int = 4,
    dropout: float = 0.0,
    sublayers: bool = False,
) -> nn.Sequential:
    """Tokens (B, T) -> logits (B, T, outputs): embedding, `depth` blocks, norm and head; depth + 2 stages.

    sublayers: attention and feedforward network of a block are stages of their own; 2 · depth + 2 stages.

    The blocks are pre-norm. Weights have torch's initialisation, which is larger than is common for transformers, so
    that the updates within a delay change only a small part of them. The head has weights of its own: if it shared
    those of the embedding, the first and the last stage would have to be updated together. outputs: only the first
    `outputs` tokens can be predicted (None: all).
    """
    if width % heads:
        raise ValueError(f"model.heads={heads} does not divide model.width={width}")
    last = nn.Linear(width, outputs or vocabulary, bias=False)
    first = Embedding(vocabulary, context, width)
    blocks = [Block(width, heads, dropout) for _ in range(depth)]
    parts = [part for block in blocks for part in (block.children() if sublayers else (block,))]
    return nn.Sequential(first, *parts, nn.Sequential(nn.LayerNorm(width), last))


@takes("vocabulary")
def gpt(
    vocabulary: int,
    context: int,
    outputs: int | None = None,
    layers: int = 12,
    width: int = 768,
    heads: int | None = None,
    dropout: float = 0.0,
    meta: bool = False,
) -> nn.Sequential:
    """Return a `transformer` by the sizes of GPTs, with about 12 · layers · width² weights.

    heads: None: as many as have 64 numbers each. meta: build it on the meta device; a pipeline with a store then
    initialises each stage when it stores it.
    """
    heads = heads or max(1, width // 64)
    with torch.device("meta") if meta else nullcontext():
        return transformer(
            vocabulary=vocabulary, context=context, outputs=outputs, width=width, depth=layers, heads=heads,
            dropout=dropout,
        )  # fmt: skip
