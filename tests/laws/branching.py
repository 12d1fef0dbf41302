"""A model with all that a plain sequence has not, and the same by hand: a sequence that hands everything along."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, linear

import pipeback
from tests.laws.cases import OPTIMIZERS, usual

WORDS, WIDTH, STAGES = 7, 8, 5


class Branching(nn.Module):
    """Tokens and a mask -> {"scores": …}: a tied head, a long skip, a change in place, dropout, a weight of its own."""

    def __init__(self, drop: float = 0.0, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop = drop
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(9, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = norm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        h = self.norm(self.first(x).flatten(0, 1)).relu_().unflatten(0, tokens.shape)
        h = dropout(h, self.drop, self.training)
        g = torch.tanh(self.second(h))
        if mask is not None:
            g = g * mask[..., None]
        y = self.third(torch.cat([g, x], -1))
        y += h
        return {"scores": self.head(y).flatten(0, 1), "kind": "words", "hidden": (y, None)}


class Piece(nn.Module):
    def __init__(self, whole: Branching, do: Any, *names: str) -> None:
        super().__init__()
        self.do = (do,)
        for name in names:
            part = getattr(whole, name)
            self.register_parameter(name, part) if isinstance(part, nn.Parameter) else self.add_module(name, part)

    def forward(self, value: Any) -> Any:
        return self.do[0](self, *value)


def by_hand(whole: Branching) -> nn.Sequential:
    """The same in five stages; the tied weight goes along as a tensor."""
    bias = nn.Module()
    bias.bias = whole.head.bias

    def embed(own: Any, tokens: Any, mask: Any) -> Any:
        weight = own.embed.weight.clone()
        return mask, own.embed(tokens) + own.position[: tokens.shape[1]], weight

    def first(own: Any, mask: Any, x: Any, weight: Any) -> Any:
        h = own.norm(own.first(x).flatten(0, 1)).relu_().unflatten(0, x.shape[:2])
        return mask, x, dropout(h, whole.drop, own.training), weight

    def second(own: Any, mask: Any, x: Any, h: Any, weight: Any) -> Any:
        return x, h, torch.tanh(own.second(h)) * mask.detach()[..., None], weight

    def third(own: Any, x: Any, h: Any, g: Any, weight: Any) -> Any:
        return own.third(torch.cat([g, x], -1)) + h, weight

    def head(own: Any, y: Any, weight: Any) -> Any:
        return linear(y, weight, own.head.bias).flatten(0, 1)

    whole.head = bias
    return nn.Sequential(
        Piece(whole, embed, "embed", "position"), Piece(whole, first, "first", "norm"), Piece(whole, second, "second"),
        Piece(whole, third, "third"), Piece(whole, head, "head"),
    )  # fmt: skip


def batches(count: int, samples: int = 4, lengths: tuple[int, ...] = (6, 6, 3), seed: int = 1) -> list[Any]:
    """(x, y), of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in range(count):
        shape = samples, lengths[n % len(lengths)]
        tokens = torch.randint(0, WORDS, shape, generator=generator)
        mask = torch.randint(0, 2, shape, generator=generator).float()
        found.append(({"tokens": tokens, "mask": mask}, torch.randint(0, WORDS, shape, generator=generator).flatten()))
    return found


def loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output["scores"] if isinstance(output, dict) else output, y.flatten())


def build(
    method: Any, optimizer: str | None = None, drop: float = 0.0, norm: Any = nn.BatchNorm1d, **options: Any
) -> pipeback.Pipeline:
    """Followed, per layer."""
    x, _ = batches(1)[0]
    torch.manual_seed(7)
    return pipeback.Pipeline(
        Branching(drop, norm), loss=loss, optimizer=OPTIMIZERS[optimizer or usual(method)], method=method, example=x,
        stages="layer", **options,
    )  # fmt: skip
