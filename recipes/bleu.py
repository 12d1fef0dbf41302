"""Bleu: translates with a language model, and scores the translations."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeback.recipes.data.translation import END, PADDING, UNKNOWN


@torch.no_grad()
def translate(model: nn.Module, prompts: Tensor, lengths: Tensor, most: int) -> Tensor:
    """Return greedy answers (N, most), padded after their end. Every step runs the whole prefix, without a cache.

    prompts (N, P) are padded on the right: a causal model does not see the padding, and the answer is written over it.
    """
    n = len(prompts)
    rows = torch.arange(n, device=prompts.device)
    tokens = torch.cat([prompts, prompts.new_full((n, most), PADDING)], 1)
    ended = torch.zeros(n, dtype=torch.bool, device=prompts.device)
    for step in range(most):
        at = lengths + step - 1  # the positions whose next token is predicted
        logits = model(tokens[:, : int(at.max()) + 1])[rows, at]  # (N, outputs)
        logits[:, [PADDING, UNKNOWN]] = -math.inf
        best = logits.argmax(1).masked_fill(ended, PADDING)
        tokens[rows, at + 1] = best
        ended |= best == END
        if ended.all():
            break
    return tokens[rows[:, None], lengths[:, None] + torch.arange(most, device=prompts.device)]


def score(translations: list[str], references: list[str]) -> float:
    """Return BLEU, 0 to 100, of a corpus with one reference per sentence, without regard to case."""
    from sacrebleu.metrics import BLEU

    # force: no warning about translations that end in " .", as they do if words and punctuation are tokens
    return BLEU(lowercase=True, force=True).corpus_score(translations, [references]).score
