"""Sequences: torch's own modules for sequences, with embeddings and heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeback.recipes.foreign.case import CLASSES, Case

WORDS, PAD, WIDTH = 50, 0, 32


class Translator(nn.Module):
    """nn.Transformer between embeddings and a head: tokens (B, S) and (B, T) -> scores (B, T, WORDS)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.target_words, self.target_places = self.words, self.places  # tied: two names for one module
        self.body = nn.Transformer(WIDTH, 4, layers, layers, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        padding = source == PAD
        found = self.body(
            _embedded(source, self.words, self.places), _embedded(target, self.target_words, self.target_places),
            tgt_mask=later, src_key_padding_mask=padding, tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(found)


def _embedded(tokens: Tensor, words: nn.Module, places: nn.Module) -> Tensor:
    found: Tensor = words(tokens) + places(torch.arange(tokens.shape[1], device=tokens.device))
    return found


def seq2seq() -> Case:
    """Encoder and decoder, with padding in both and a causal mask."""

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        source = torch.randint(1, WORDS, (2, 12), generator=generator)
        target = torch.randint(1, WORDS, (2, 9), generator=generator)
        source[0, -3:] = target[1, -2:] = PAD
        return {"source": source, "target": target[:, :-1]}, target[:, 1:]

    return Case(Translator(), batch, scored)


def scored(scores: Tensor, words: Tensor) -> Tensor:
    """Return the loss of scores (B, T, WORDS) for the tokens (B, T)."""
    return cross_entropy(scores.flatten(0, 1), words.flatten(), ignore_index=PAD)


class Reader(nn.Module):
    """Embedding, two LSTM layers one after the other, and a head on the last state: tokens (B, T) -> (B, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.LSTM(WIDTH, 64, batch_first=True)
        self.second = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        values, state = self.first(self.words(tokens))
        _, (last, _) = self.second(values, state)
        return self.head(last[-1])


def lstm() -> Case:
    """An LSTM is one layer, which passes on its state beside its output."""

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        tokens = torch.randint(1, WORDS, (2, 10), generator=generator)
        return tokens, torch.randint(CLASSES, (2,), generator=generator)

    return Case(Reader(), batch, cross_entropy, cuts=("layer",))
