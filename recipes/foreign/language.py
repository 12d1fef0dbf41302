"""Language models of transformers, from small configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pipeback.recipes.foreign.case import WORDS, Case, steady, tokens


def next_token(output: Any, words: Tensor) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1), words.flatten())


def gpt2() -> Case:
    """The embedding of the tokens and the head share one weight."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Case(GPT2LMHeadModel(config).train(), tokens, next_token)


def llama() -> Case:
    """It has rotary positions, which every layer gets from the first stage."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Case(LlamaForCausalLM(config).train(), tokens, next_token)


def t5() -> Case:
    """Encoder and decoder; three modules share the weight of the embedding, and all layers a bias of the first."""
    config = T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, use_cache=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        x, y = tokens(generator)
        return x | {"decoder_input_ids": y[:, :-1].contiguous()}, y[:, 1:].contiguous()

    return Case(steady(T5ForConditionalGeneration(config)).train(), batch, next_token)
