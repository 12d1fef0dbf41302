"""Translation: pairs of sentences as one sequence each: source words, a separator, target words, the end.

A model predicts only the words after the separator. Tokens: 0 padding, 1 separator, 2 end, 3 unknown; then the target's
words, so that a model has outputs for these only; then the source's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pipeback.recipes.data.files import find, given
from pipeback.recipes.data.loading import Data, Samples
from pipeback.recipes.data.pairs import Pair, common, generated, read, split, tokens

PADDING, SEPARATOR, END, UNKNOWN = range(4)
IGNORED = -100  # the target of positions that are not predicted, which cross_entropy ignores by default
ORIGIN = (
    "they are Tatoeba's sentence pairs through manythings.org/anki; other tab-separated .txt, .tsv or .zip: data.file="
)
NAMES = ("deu.txt", "deu-eng.zip", "deu-eng.tsv")


class Sentences(NamedTuple):
    prompts: Tensor  # (N, max_length + 1) source and separator, then padding
    lengths: Tensor  # (N,) of the prompts, the separator included
    references: list[str]


class Translation(Data):
    """x (B, 2 * max_length + 1) int64 tokens; y of the same shape: the next token if it is a target word, else -100.

    root         the folder of deu.txt or deu-eng.zip;  file: other tab-separated pairs
    reverse      true: from the second column to the first
    max_length   longest sentence in words and signs, on both sides; pairs with a longer one are left out
    pairs        train on this many pairs only, chosen by hash
    vocabulary   known words of each language, the most frequent of the training pairs; lower case
    held_out     share of the sentences of the first column that validate, chosen by hash; their sentences, in either
                 language, are in no training pair
    val_samples  validate on this many pairs only
    builtin      a few generated pairs instead, for a trial without files
    """

    limits = "data.pairs, data.val_samples, data.held_out and data.max_length"

    def __init__(
        self,
        root: str = "data",
        file: str | None = None,
        reverse: bool = False,
        max_length: int = 8,
        pairs: int | None = None,
        vocabulary: int = 2000,
        held_out: float = 0.01,
        val_samples: int | None = None,
        builtin: bool = False,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        if not 0 < held_out < 1:
            raise ValueError(f"data.held_out must be between 0 and 1, but is {held_out!r}")
        self.root, self.file, self.reverse, self.builtin = root, file, reverse, builtin
        self.max_length, self.pairs, self.vocabulary = max_length, pairs, vocabulary
        self.held_out, self.val_samples = held_out, val_samples
        self.words: list[str] = []
        """The word of each token."""
        self.pairs_held_out: list[Pair] = []

    def load(self) -> tuple[Samples, Samples]:
        training, self.pairs_held_out = self.split()
        sources, targets = (common((pair[side] for pair in training), self.vocabulary) for side in (0, 1))
        self.words = ["", "|", "", "?", *targets, *sources]
        first, border = UNKNOWN + 1, UNKNOWN + 1 + len(targets)
        self.target = {word: first + i for i, word in enumerate(targets)}
        self.source = {word: border + i for i, word in enumerate(sources)}
        self.facts = {"vocabulary": len(self.words), "outputs": border, "context": 2 * self.max_length + 1}
        return self.encoded(training), self.encoded(self.pairs_held_out)

    def split(self) -> tuple[list[Pair], list[Pair]]:
        """Return pairs for training and for validation, in the direction of the translation."""
        if self.builtin:
            rows = generated()
        else:
            rows = read(given(self.file, ORIGIN) if self.file else find(self.root, NAMES, ORIGIN))
        training, validation = split(rows, self.held_out, self.max_length)
        if self.reverse:
            training, validation = ([Pair(*pair[::-1]) for pair in part] for part in (training, validation))
        return training[: self.pairs], validation[: self.val_samples]

    def encoded(self, pairs: list[Pair]) -> Samples:
        x = torch.full((len(pairs), 2 * self.max_length + 2), PADDING)
        y = torch.full_like(x, IGNORED)
        for row, (source, target) in enumerate(pairs):
            prompt, answer = self.prompt(source), [*self.numbers(self.target, target), END]
            n = len(prompt) + len(answer)
            x[row, :n] = torch.tensor(prompt + answer)
            y[row, len(prompt) : n] = x[row, len(prompt) : n]
        return Samples(x[:, :-1].contiguous(), y[:, 1:].contiguous())

    def prompt(self, source: str) -> list[int]:
        return [*self.numbers(self.source, source), SEPARATOR]

    def numbers(self, known: dict[str, int], sentence: str) -> list[int]:
        return [known.get(word, UNKNOWN) for word in tokens(sentence)]

    def sentences(self, count: int) -> Sentences:
        """Return the first `count` validation sentences with their references, for translation."""
        _ = self.validation
        some = self.pairs_held_out[:count]
        prompts = torch.full((len(some), self.max_length + 1), PADDING)
        for row, pair in enumerate(some):
            prompt = self.prompt(pair.source)
            prompts[row, : len(prompt)] = torch.tensor(prompt)
        return Sentences(prompts, (prompts != PADDING).sum(1), [pair.target for pair in some])

    def text(self, numbers: Iterable[int]) -> str:
        """Return the words of these tokens, up to the end token."""
        words = []
        for number in numbers:
            if number in (END, PADDING):
                break
            words.append(self.words[number])
        return " ".join(words)
